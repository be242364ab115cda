"""Children die with their parent, are put into words, and see nothing that they should not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pegahpc.launch.children import Child, Program, clean_environment, last_line
from pegahpc.launch.identity import ProcessId
from tests.launch.running_fleet import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT = """
import sys, time
from pathlib import Path
from pegahpc.launch.children import Child, Program
command = [sys.executable, "-c", "import time; time.sleep(60)"]
child = Child.spawn(Program("c", command, {}, Path(sys.argv[1])))
print(child.id.pid, child.id.started, flush=True)
time.sleep(60)
"""


def spawn(tmp_path: Path, *code: str) -> Child:
    command = [sys.executable, "-c", *code] if code else SLEEP
    return Child.spawn(Program("rank 2", command, {}, tmp_path / "log"))


def test_a_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = ProcessId(*map(int, parent.stdout.readline().split()))
        assert child.is_alive()
        parent.kill()
    until(lambda: not child.is_alive(), 5)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_how_a_child_ended_is_said_in_words(tmp_path: Path, code: str, says: str) -> None:
    child = spawn(tmp_path, code)
    child.hand_over(b"")
    child.process.wait(10)
    assert child.describe() == f"rank 2 (pid {child.id.pid}) {says}"


def test_a_child_that_has_ended_takes_no_document_and_no_signal(tmp_path: Path) -> None:
    child = spawn(tmp_path, "raise SystemExit(0)")
    child.process.wait(10)
    child.hand_over(b"x" * (1 << 17))
    child.signal(signal.SIGTERM)
    assert child.exit_code == 0


def test_an_ended_process_that_waits_to_be_reaped_does_not_count_as_alive(tmp_path: Path) -> None:
    child = spawn(tmp_path, "raise SystemExit(0)")
    until(lambda: not child.id.is_alive(), 10)
    assert Path(f"/proc/{child.id.pid}").exists()
    assert not child.id.signal(signal.SIGTERM)
    child.hand_over(b"")
    assert child.exit_code == 0


def test_the_environment_keeps_what_is_known_and_drops_the_launchers() -> None:
    given = {"PATH": "/bin", "SLURM_JOB_ID": "1", "PMI_RANK": "0", "OMPI_X": "1", "http_proxy": "x", "LC_ALL": "C"}
    kept = clean_environment(given, num_threads=2, interface="ib0")
    assert kept["PATH"] == "/bin" and kept["LC_ALL"] == "C"
    assert kept["OMP_NUM_THREADS"] == "2" and kept["GLOO_SOCKET_IFNAME"] == "ib0"
    assert kept["PYTHONSAFEPATH"] == "1"
    assert not set(kept) & {"SLURM_JOB_ID", "PMI_RANK", "OMPI_X", "http_proxy"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("a\n2026-12-01T06:48:44.001 ERROR pegahpc.x: engine.dtype: no\n\n", "engine.dtype: no"),
        ("2026-12-01 06:48:44,001 gateway ERROR __main__: gateway.port: taken\n", "gateway.port: taken"),
        ("ImportError: x", "ImportError: x"),
    ],
)
def test_the_last_line_of_a_log_is_its_reason(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == line


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    own = ProcessId.own()
    assert own.is_alive() and own.pid == os.getpid()
    assert not ProcessId(own.pid, own.started + 1).is_alive()
    ticks = os.sysconf("SC_CLK_TCK")
    assert 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / ticks < 3600
