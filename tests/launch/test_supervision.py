"""Whatever dies, the whole fleet ends within seconds, the culprit is named, and nothing is left."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from pegahpc.config import ConfigError
from pegahpc.launch.down import take_down
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.record import FleetRecord
from tests.launch.conftest import Start
from tests.launch.running_fleet import RunningFleet, until

SECONDS_TO_END = 6.0


def when_ready(fleet: RunningFleet) -> FleetRecord:
    record = fleet.wait_for("ready", "failed")
    assert record.state == "ready", record.reason
    assert len(fleet.processes()) == len(record.processes())
    return record


def kill(process: ProcessId | None) -> None:
    assert process is not None and process.signal(signal.SIGKILL)


def assert_failed(fleet: RunningFleet, before: FleetRecord, *said: str, within_s: float = SECONDS_TO_END) -> None:
    began_s = time.monotonic()
    after = fleet.wait_for("failed")
    fleet.assert_nothing_is_left(before.ports())
    assert time.monotonic() - began_s < within_s
    after = fleet.record()
    for words in said:
        assert words in after.reason
    assert "still running" not in after.reason
    assert after.ended_at >= before.ready_at


def test_a_killed_rank_ends_the_fleet_and_is_named_with_tray_pid_and_log(start: Start) -> None:
    fleet = start("topology=ep4")
    record = when_ready(fleet)
    victim = record.ranks[2]
    kill(victim.process)
    assert victim.process is not None
    who = f"rank 2 (tray 1, host {socket.gethostname()}, pid {victim.process.pid}) was killed by SIGKILL"
    assert_failed(fleet, record, who, "last seen at step", victim.log)
    assert fleet.launcher.wait(5) == 1
    assert "told the clients" in (fleet.folder / "logs" / "gateway.log").read_text()


def test_what_a_rank_has_started_ends_with_the_fleet(start: Start) -> None:
    fleet = start("1:breed", "topology=ep2")
    record = fleet.wait_for("ready")
    offspring = {process.pid for process in fleet.processes()} - {process.pid for _, process in record.processes()}
    assert len(offspring) == 1
    kill(record.ranks[1].process)
    assert_failed(fleet, record, "rank 1 (tray 0", "was killed by SIGKILL", within_s=3)


@pytest.mark.parametrize("tray", [0, 1])
def test_a_killed_tray_ends_the_fleet_and_is_named(start: Start, tray: int) -> None:
    fleet = start("topology=ep4")
    record = when_ready(fleet)
    (victim,) = [entry.process for entry in record.trays if entry.tray == tray]
    kill(victim)
    assert_failed(fleet, record, f"tray {tray} (pid {victim.pid}) was killed by SIGKILL")


def test_a_killed_gateway_ends_the_fleet_and_is_named(start: Start) -> None:
    fleet = start("topology=ep2")
    record = when_ready(fleet)
    assert record.gateway is not None
    kill(record.gateway.process)
    assert_failed(fleet, record, f"gateway (pid {record.gateway.process.pid}) was killed by SIGKILL", "gateway.log")


def test_a_killed_launcher_takes_the_fleet_along(start: Start) -> None:
    fleet = start("topology=ep4")
    record = when_ready(fleet)
    kill(record.launcher)
    assert_failed(fleet, record, f"launcher (pid {record.launcher.pid})")


def test_when_everything_is_killed_at_once_the_name_is_free_at_once(start: Start) -> None:
    fleet = start("topology=ep2")
    record = when_ready(fleet)
    for _, process in record.processes():
        process.signal(signal.SIGKILL)
    fleet.launcher.wait(5)
    second = start("topology=ep2")
    after = when_ready(second)
    assert after.run_id != record.run_id
    fleet.assert_ports_closed(record.ports())


def test_a_killed_launcher_and_head_leave_a_record_that_says_so(start: Start) -> None:
    fleet = start("topology=ep4")
    record = when_ready(fleet)
    kill(record.trays[0].process)
    kill(record.launcher)
    assert_failed(fleet, record, "launcher (pid")


def test_a_frozen_rank_is_found_by_its_silence(start: Start) -> None:
    fleet = start("topology=ep4", "gateway.stall_s=2")
    record = when_ready(fleet)
    victim = record.ranks[3].process
    assert victim is not None and victim.signal(signal.SIGSTOP)
    assert_failed(fleet, record, "rank 3 (tray 1", "has been silent for")


def test_a_rank_that_others_wait_for_is_found_though_it_speaks(start: Start) -> None:
    fleet = start("2:stall", "topology=ep4", "gateway.stall_s=2")
    record = fleet.wait_for("failed")
    assert "rank 2 (tray 1" in record.reason and "has not moved for" in record.reason


@pytest.mark.slow
def test_a_frozen_tray_is_named_and_not_its_ranks(start: Start) -> None:
    fleet = start("topology=ep4", "gateway.stall_s=2")
    record = when_ready(fleet)
    (victim,) = [entry.process for entry in record.trays if entry.tray == 1]
    assert victim.signal(signal.SIGSTOP)
    assert_failed(fleet, record, f"tray 1 (pid {victim.pid}", "ranks 2..3) has been silent for", within_s=8)


@pytest.mark.parametrize("topology", ["ep1", "ep4"])
def test_a_frozen_launcher_is_named_and_ended_with_its_fleet(start: Start, topology: str) -> None:
    fleet = start(f"topology={topology}", "gateway.stall_s=2")
    record = when_ready(fleet)
    assert record.launcher.signal(signal.SIGSTOP)
    assert_failed(fleet, record, f"launcher (pid {record.launcher.pid}) is frozen", within_s=8)


def test_a_frozen_gateway_is_named(start: Start) -> None:
    fleet = start("topology=ep2", "gateway.stall_s=2")
    record = when_ready(fleet)
    assert record.gateway is not None and record.gateway.process.signal(signal.SIGSTOP)
    assert_failed(fleet, record, f"gateway (pid {record.gateway.process.pid}) is frozen", "gateway.log")


def test_a_gateway_whose_loop_hangs_is_found_though_its_process_lives(start: Start) -> None:
    fleet = start("topology=ep2", "gateway.stall_s=2", gateway="hang")
    record = when_ready(fleet)
    assert record.gateway is not None
    says = f"gateway (pid {record.gateway.process.pid}) hangs: its event loop has not turned for "
    assert_failed(fleet, record, says, "gateway.log")


def test_what_is_frozen_while_the_fleet_loads_is_named(start: Start) -> None:
    """Long before the bound on loading, which may be half an hour."""
    for who, says in (("rank 0", "is frozen; last seen at"), ("tray 1", "has been silent for")):
        fleet = start("3:hang", "topology=ep4", "gateway.stall_s=2")
        fleet.wait_for("loading")
        until(lambda fleet=fleet: bool(fleet.record().ranks[0].endpoint))  # type: ignore[misc]
        fleet.processes()
        record = fleet.record()
        assert dict(record.processes())[who].signal(signal.SIGSTOP)
        reason = fleet.wait_for("failed").reason
        assert reason.startswith(f"{who} (") and says in reason
        fleet.launcher.wait(5)
        fleet.assert_nothing_is_left(record.ports())


def test_a_suspended_terminal_does_not_freeze_the_launcher(start: Start) -> None:
    fleet = start("topology=ep1", "gateway.stall_s=1")
    record = when_ready(fleet)
    fleet.launcher.send_signal(signal.SIGTSTP)
    time.sleep(1.5)
    assert not record.launcher.is_frozen() and fleet.record().state == "ready"


def test_a_frozen_head_is_ended_by_the_launcher(start: Start) -> None:
    fleet = start("topology=ep2", "gateway.stall_s=2")
    record = when_ready(fleet)
    assert record.trays[0].process.signal(signal.SIGSTOP)
    assert_failed(fleet, record, "tray 0 (pid", "frozen", within_s=8)


def test_a_fleet_whose_folder_is_removed_serves_on_and_still_ends_well(start: Start) -> None:
    fleet = start("topology=ep2")
    record = when_ready(fleet)
    shutil.rmtree(fleet.folder)
    time.sleep(1.5)
    assert fleet.launcher.poll() is None
    fleet.launcher.send_signal(signal.SIGTERM)
    assert fleet.launcher.wait(10) in (0, 1)
    assert record.survivors() == []
    fleet.assert_ports_closed(record.ports())


def test_what_a_user_can_mend_is_the_reason_once_and_short(start: Start) -> None:
    fleet = start("1:refuse", "topology=ep4")
    reason = fleet.wait_for("failed").reason
    assert reason.startswith("model.path: tensor 'x' is missing (rank 1; log: ")
    assert reason.count("missing") == 1


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("3:die", "rank 3 (tray 1, host {host}, pid {pid}) exited with code 7; last seen at stage boot"),
        ("0:raise", "rank 0 (tray 0, host {host}, pid {pid}) boom; last seen at stage load"),
        ("1:quit", "rank 1 (tray 0, host {host}, pid {pid}) left without being asked"),
    ],
)
def test_a_rank_that_ends_by_itself_is_named(start: Start, act: str, says: str) -> None:
    fleet = start(act, "topology=ep4")
    reason = fleet.wait_for("failed").reason
    pid = reason.partition("pid ")[2].partition(")")[0]
    assert int(pid) > 0
    assert says.format(host=socket.gethostname(), pid=pid) in reason


def test_ranks_that_are_not_ready_in_time_are_named_with_their_stage(start: Start) -> None:
    fleet = start("1:hang", "topology=ep2", "fleet.ready_timeout_s=1")
    reason = fleet.wait_for("failed").reason
    assert reason == "fleet.ready_timeout_s: not ready: rank 1 (load 50%) after 1 s"


def test_a_gateway_that_cannot_bind_says_which_key(start: Start) -> None:
    fleet = start("topology=ep1", gateway="taken")
    assert fleet.wait_for("failed").reason == "gateway.port: 80 is taken"


def test_a_drained_fleet_ends_well_and_leaves_nothing(start: Start) -> None:
    fleet = start("topology=ep4")
    record = when_ready(fleet)
    fleet.launcher.send_signal(signal.SIGTERM)
    assert fleet.launcher.wait(10) == 0
    after = fleet.record()
    assert (after.state, after.reason) == ("ended", "drained")
    fleet.assert_nothing_is_left(record.ports())
    events = [json.loads(line)["event"] for line in (fleet.folder / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event != "stage"] == [
        "starting", "loading", "ready", "draining", "ended", "closed",
    ]  # fmt: skip


def test_a_fleet_that_is_stopped_while_it_loads_ends_well(start: Start) -> None:
    fleet = start("0:hang", "topology=ep2")
    fleet.wait_for("loading")
    fleet.processes()
    fleet.launcher.send_signal(signal.SIGINT)
    assert fleet.launcher.wait(10) == 0
    assert fleet.record().reason == "stopped before it was ready"
    fleet.assert_nothing_is_left([])


def test_a_second_interrupt_does_not_wait(start: Start) -> None:
    fleet = start("topology=ep2")
    record = when_ready(fleet)
    assert record.gateway is not None and record.gateway.process.signal(signal.SIGSTOP)  # would drain for 35 s
    fleet.launcher.send_signal(signal.SIGINT)
    fleet.wait_for("draining")
    fleet.launcher.send_signal(signal.SIGINT)
    assert fleet.launcher.wait(5) == 0
    assert fleet.record().reason == "stopped at once"
    fleet.assert_nothing_is_left(record.ports())


def test_a_fleet_whose_name_lives_is_not_started_again(start: Start) -> None:
    fleet = start("topology=ep1")
    record = when_ready(fleet)
    with pytest.raises(ConfigError, match=f"fleet.name: a fleet 'pegahpc' is alive on .* .pid {record.launcher.pid}"):
        start("topology=ep1")
    assert fleet.record().state == "ready"


def test_garbage_on_the_rendezvous_port_harms_a_running_fleet_in_no_way(start: Start) -> None:
    fleet = start("topology=ep2")
    record = when_ready(fleet)
    host, port = record.rendezvous.split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x00\x00\x00\x05hello"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(garbage)
            stranger.settimeout(5)
            until_closed(stranger)
    step = fleet.record().ranks[0].step
    until(lambda: fleet.record().ranks[0].step > step)
    assert fleet.record().state == "ready"
    assert "rendezvous: closed 127.0.0.1" in (fleet.folder / "logs" / "tray-0.log").read_text()


def until_closed(stranger: socket.socket) -> None:
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        return


def test_children_see_a_clean_environment_and_their_threads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    fleet = start("topology=ep2", "engine.num_threads=3")
    record = when_ready(fleet)
    for who, process in record.processes():
        if who != "launcher":
            environment = psutil.Process(process.pid).environ()
            assert not [key for key in environment if key.startswith(("SLURM_", "PMI", "OMPI_")) or "proxy" in key]
            assert environment["PYTHONSAFEPATH"] == "1"
            assert environment["OMP_NUM_THREADS"] == ("3" if who.startswith("rank") else "1")
            assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_folder_and_the_secret_are_their_owners_alone(start: Start) -> None:
    fleet = start("topology=ep1")
    when_ready(fleet)
    assert fleet.folder.stat().st_mode & 0o777 == 0o700
    assert (fleet.folder / "secret").stat().st_mode & 0o777 == 0o600
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if os.access(entry, os.R_OK):
            assert b"pega-" not in entry.read_bytes()


def test_a_serving_fleet_outlives_its_record_and_writes_it_anew(start: Start) -> None:
    fleet = start("topology=ep1")
    record = when_ready(fleet)
    for junk in ("x", "{}", ""):
        (fleet.folder / "record.json").write_text(junk)
        until(lambda: fleet.record().state == "ready")
    (fleet.folder / "record.json").write_text("x")
    ended = take_down(fleet.folder, fleet.record(), now=False)
    assert (ended.state, ended.reason, ended.left) == ("ended", "drained", [])
    fleet.assert_nothing_is_left(record.ports())


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_whenever_it_is_stopped_early_a_fleet_has_ended_and_not_failed(start: Start, after_s: float) -> None:
    fleet = start("topology=ep4")
    until(lambda: is_listening(fleet))
    time.sleep(after_s)
    fleet.processes()
    fleet.launcher.send_signal(signal.SIGINT)
    assert fleet.launcher.wait(10) == 0
    record = fleet.record()
    assert (record.state, record.reason) in [("ended", "stopped before it was ready"), ("ended", "drained")]
    fleet.assert_nothing_is_left(record.ports())


def is_listening(fleet: RunningFleet) -> bool:
    """Whether the launcher has come so far as to drain (Python itself catches SIGINT, but not SIGHUP)."""
    lines = Path(f"/proc/{fleet.launcher.pid}/status").read_text().splitlines()
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught >> (signal.SIGHUP - 1) & 1)
