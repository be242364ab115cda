"""The whole thing, as a user runs it: the shipped model, the command line, HTTP, and the end."""

import http.client
import json
import os
import pty
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pegahpc.launch.children import python_module
from pegahpc.launch.record import FleetRecord, read_record
from tests.launch.conftest import Run
from tests.launch.running_fleet import until

pytestmark = pytest.mark.slow
QUESTION, ANSWER = "What is 3 plus 4?", "3 plus 4 is 7."
READY_WITHIN_S = 40.0  # 20 s is promised on an idle machine with two cores


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ep4(pegahpc: Run, home: Path) -> Iterator[dict[str, Any]]:
    """A detached fleet of 4 ranks on 2 trays: what `up --detach --json` printed."""
    ran = pegahpc("up", "--detach", "--json", "--name", "four", "--home", str(home), "topology=ep4", "gateway.port=0")
    assert ran.returncode == 0, ran.stderr
    yield json.loads(ran.stdout)
    pegahpc("down", "--now", "--name", "four", "--home", str(home))


def test_up_detached_returns_when_the_fleet_answers(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    assert ep4["name"] == "four" and ep4["ready_s"] < READY_WITHIN_S
    ran = pegahpc("url", "--json", "--home", str(home))
    assert json.loads(ran.stdout) == {"url": ep4["url"], "api_key": ep4["api_key"]}
    assert pegahpc("url", "--key", "--home", str(home)).stdout.strip() == ep4["api_key"]


def test_status_tells_of_every_rank_and_steps_go_on(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    first, second = (json.loads(pegahpc("status", "--json", "--home", str(home)).stdout) for _ in wait_between(2.5))
    assert first["state"] == "ready" and first["gateway"]["url"] == ep4["url"]
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1, 2, 3]
    assert [rank["tray"] for rank in first["ranks"]] == [0, 0, 1, 1]
    for before, after in zip(first["ranks"], second["ranks"], strict=True):
        assert before["stage"] == "ready" and psutil.pid_exists(before["pid"])
        assert after["step"] > before["step"]
        assert after["last_seen_s"] < 2.0
        assert after["phases"]["idle_s"] > before["phases"]["idle_s"]
        assert sum(after["phase_shares"].values()) == pytest.approx(1, abs=0.01)
    assert "share of each phase" in pegahpc("status", "--home", str(home)).stdout


def wait_between(pause_s: float) -> Iterator[None]:
    yield None
    time.sleep(pause_s)
    yield None


def test_one_message_is_answered_on_standard_output(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    ran = pegahpc("chat", "-m", QUESTION, "--temperature", "0", "--home", str(home))
    assert (ran.returncode, ran.stdout.strip()) == (0, ANSWER)


def test_a_conversation_goes_on_until_the_end_of_input(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    ran = pegahpc("chat", "--temperature", "0", "--home", str(home), stdin=f"{QUESTION}\n/reset\n{QUESTION}\n")
    assert ran.returncode == 0
    assert ran.stdout.count(ANSWER) == 2


def test_smoke_passes_and_says_what_it_found(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    ran = pegahpc("smoke", "--json", "--home", str(home))
    checks = json.loads(ran.stdout)
    assert ran.returncode == 0 and len(checks) >= 5
    assert [check["found"] for check in checks if check["name"] == QUESTION] == [ANSWER]


def test_ls_lists_the_fleet(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    (listed,) = json.loads(pegahpc("ls", "--json", "--home", str(home)).stdout)
    assert (listed["name"], listed["state"]) == ("four", "ready")
    assert ep4["url"] in pegahpc("ls", "--home", str(home)).stdout


def test_logs_of_all_processes_come_in_order_with_their_names(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    lines = [json.loads(line) for line in pegahpc("logs", "--json", "--home", str(home)).stdout.splitlines()]
    assert {line["who"] for line in lines} >= {"tray-0", "rank-0", "rank-3", "gateway"}
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert len(pegahpc("logs", "-n", "3", "--home", str(home)).stdout.splitlines()) == 3


def test_a_second_fleet_of_the_same_name_is_refused_in_one_line(ep4: dict[str, Any], home: Path, pegahpc: Run) -> None:
    ran = pegahpc("up", "--name", "four", "--home", str(home), "topology=ep1", "gateway.port=0")
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("pegahpc: fleet.name: a fleet 'four' is alive on ")
    assert len(ran.stderr.splitlines()) == 1


def test_all_ports_of_the_fleet_are_on_the_loopback(ep4: dict[str, Any], home: Path) -> None:
    record = read_record(home / "fleets" / "four")
    assert record is not None
    for who, process in record.processes():
        for connection in psutil.Process(process.pid).net_connections():
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", f"{who} listens on {connection.laddr}"


def test_down_drains_and_proves_that_nothing_is_left(pegahpc: Run, home: Path) -> None:
    up = pegahpc("up", "-d", "--json", "--name", "one", "--home", str(home), "topology=ep1", "gateway.port=0")
    assert up.returncode == 0, up.stderr
    record = read_record(home / "fleets" / "one")
    assert record is not None
    ran = pegahpc("down", "--json", "--name", "one", "--home", str(home))
    proof = json.loads(ran.stdout)
    assert ran.returncode == 0
    assert (proof["state"], proof["reason"], proof["left"]) == ("ended", "drained", [])
    assert proof["num_processes"] == 4 and proof["num_ports"] == 3
    assert record.survivors() == []
    refused = pegahpc("url", "--name", "one", "--home", str(home))
    assert refused.returncode == 2
    assert refused.stderr == "pegahpc: fleet.name: fleet 'one' does not serve, it is ended: drained\n"


def test_a_running_stream_is_finished_by_a_drain(pegahpc: Run, home: Path) -> None:
    name = ("--name", "drained", "--home", str(home))
    up = pegahpc("up", "-d", "--json", *name, "topology=ep1", "gateway.port=0")
    ready = json.loads(up.stdout)
    host, port = ready["url"].removeprefix("http://").removesuffix("/v1").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    body = {"model": "tiny-moe", "prompt": "3", "max_tokens": 200, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {ready['api_key']}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.readline()
    record = read_record(home / "fleets" / "drained")
    assert record is not None
    record.launcher.signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    until(lambda: not record.survivors())
    after = read_record(home / "fleets" / "drained")
    assert after is not None and (after.state, after.reason) == ("ended", "drained")


@pytest.mark.parametrize("overrides", [["topology=ep1"], ["topology=ep2"], ["topology=ep2", "engine.dispatcher=torch"]])
def test_in_the_foreground_ctrl_c_on_the_terminal_drains(overrides: list[str], tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    up = subprocess.Popen(
        [*python_module("pegahpc.launch.cli"), "up", *overrides, "gateway.port=0", "--home", str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # becomes the controlling terminal
    )
    os.close(theirs)
    said = read_until(terminal, b"pegahpc chat --home", READY_WITHIN_S)
    assert b"is ready after" in said and b"pega-" not in said
    record = read_record(tmp_path / "fleets" / "pegahpc")
    assert record is not None
    os.write(terminal, b"\x03")
    rest = read_until(terminal, b"ended: drained", 20)
    assert up.wait(10) == 0, rest
    assert record.survivors() == []
    os.close(terminal)


def read_until(terminal: int, words: bytes, within_s: float) -> bytes:
    said, deadline_s = b"", time.monotonic() + within_s
    while words not in said:
        assert time.monotonic() < deadline_s, said.decode()
        if select.select([terminal], [], [], 0.2)[0]:
            said += os.read(terminal, 4096)
    return said


@pytest.mark.parametrize(
    ("victim", "dispatcher"),
    [("rank 1", "torch"), ("rank 1", "auto"), ("tray 1", "auto"), ("tray 0", "auto"), ("gateway", "auto"),
     ("launcher", "auto")],
)  # fmt: skip
def test_whatever_is_killed_of_a_real_fleet_is_named_and_nothing_is_left(
    pegahpc: Run, tmp_path: Path, victim: str, dispatcher: str
) -> None:
    settings = ("topology=ep4", "gateway.port=0", f"engine.dispatcher={dispatcher}")
    up = pegahpc("up", "-d", "--home", str(tmp_path), *settings)
    assert up.returncode == 0, up.stderr
    record = latest(tmp_path)
    process = dict(record.processes())[victim]
    assert process.signal(signal.SIGKILL)
    until(lambda: not record.survivors(), 8)
    after = json.loads(pegahpc("ls", "--json", "--home", str(tmp_path)).stdout)[0]
    assert after["state"] == "failed"
    assert after["reason"].startswith(victim) and f"pid {process.pid}" in after["reason"]
    assert "was killed" in after["reason"] or victim == "launcher"
    for _, address in record.ports():
        host, port = address.split(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0
    assert pegahpc("status", "--home", str(tmp_path)).returncode == 1


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_a_fleet_in_the_foreground_ends_with_its_shell(tmp_path: Path, signum: int) -> None:
    arguments = ["up", "topology=ep2", "gateway.port=0", "--home", str(tmp_path)]
    command = [*python_module("pegahpc.launch.cli"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert "is ready after" in up.stdout.readline()
        record = latest(tmp_path)
        up.send_signal(signum)
        up.communicate(timeout=10)
        assert up.returncode == (0 if signum == signal.SIGHUP else -signal.SIGKILL)
    until(lambda: not record.survivors(), 8)
    assert latest(tmp_path).state == ("ended" if signum == signal.SIGHUP else "failed")


def latest(home: Path) -> FleetRecord:
    record = read_record(home / "fleets" / "pegahpc")
    assert record is not None
    return record
