"""One name, one fleet: who wins, who is refused, what is taken over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegahpc.config import ConfigError
from pegahpc.launch import claim
from pegahpc.launch.claim import Claim
from pegahpc.launch.identity import ProcessId

TAKE = """
import sys, time
from pathlib import Path
from pegahpc.config import ConfigError
from pegahpc.launch import claim
from pegahpc.launch.identity import ProcessId
sys.stdin.readline()
try:
    claim.take(Path(sys.argv[1]), ProcessId.own())
except ConfigError:
    print("refused", flush=True)
else:
    print("won", flush=True)
    sys.stdin.readline()
"""


def taker(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", TAKE, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def close(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def dead() -> ProcessId:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(process.pid)
    process.communicate(b"\n")
    return identity


@pytest.mark.parametrize("is_stale", [False, True])
def test_of_many_who_start_at_once_exactly_one_wins(tmp_path: Path, is_stale: bool) -> None:
    if is_stale:
        claim.take(tmp_path, dead())
    takers = [taker(tmp_path) for _ in range(8)]
    for process in takers:
        tell(process)
    assert sorted(told(process) for process in takers) == ["refused"] * 7 + ["won"]
    for process in takers:
        close(process)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_claim_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    first = taker(tmp_path)
    tell(first)
    assert told(first) == "won"
    with pytest.raises(ConfigError, match=f"is alive on .* .pid {first.pid}.; choose another name, or end it"):
        claim.take(tmp_path, ProcessId.own())
    close(first)
    assert claim.holder_of(tmp_path) is None
    claim.take(tmp_path, ProcessId.own())
    assert claim.holder_of(tmp_path) == Claim.by(ProcessId.own())


def test_a_claim_that_is_given_back_is_free_though_its_process_lives(tmp_path: Path) -> None:
    own = ProcessId.own()
    claim.take(tmp_path, own)
    claim.release(tmp_path, own)
    assert claim.holder_of(tmp_path) is None
    claim.take(tmp_path, own)
    assert len(list(tmp_path.iterdir())) == 1


def test_nobody_gives_back_the_claim_of_another(tmp_path: Path) -> None:
    claim.take(tmp_path, ProcessId.own())
    claim.release(tmp_path, ProcessId(1, 1))
    assert claim.holder_of(tmp_path) == Claim.by(ProcessId.own())


def test_a_recycled_pid_holds_nothing(tmp_path: Path) -> None:
    own = ProcessId.own()
    claim.take(tmp_path, ProcessId(own.pid, own.started - 1))
    assert claim.holder_of(tmp_path) is None


@pytest.mark.parametrize(("key", "value", "is_held"), [("boot_id", "another", False), ("host", "another", True)])
def test_of_another_boot_nothing_lives_and_of_another_machine_nothing_is_known(
    tmp_path: Path, key: str, value: str, is_held: bool
) -> None:
    claim.take(tmp_path, ProcessId.own())
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert (claim.holder_of(tmp_path) is not None) == is_held


def test_a_damaged_claim_is_refused_by_its_path_and_nobody_holds_it(tmp_path: Path) -> None:
    claim.take(tmp_path, ProcessId.own())
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    assert claim.holder_of(tmp_path) is None
    with pytest.raises(ConfigError, match=f"fleet.home: {path} is damaged, .* remove that file"):
        claim.take(tmp_path, ProcessId.own())
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_taker_left_is_swept_and_what_one_is_writing_is_not(tmp_path: Path) -> None:
    old, new = tmp_path / ".claim.1.tmp", tmp_path / ".claim.2.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (0.0, 0.0))
    claim.drop_temp_files(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_a_claim_that_cannot_be_given_back_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    claim.take(tmp_path, ProcessId.own())
    monkeypatch.setattr(claim, "write_atomically", no_space)
    claim.release(tmp_path, ProcessId.own())
    assert claim.holder_of(tmp_path) == Claim.by(ProcessId.own())
