"""Records: written whole, read by all, and corrected when those they name are gone."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pegahpc.config import ConfigError
from pegahpc.launch import claim, fleets
from pegahpc.launch.fleets import all_fleets, find_home, look, one_fleet
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.record import FleetRecord, State, TrayEntry, new_record, prepare_folder, read_record, write_record


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def dead() -> ProcessId:
    process = child()
    identity = ProcessId.of(process.pid)
    process.communicate(b"\n")
    return identity


def put(home: Path, name: str, launcher: ProcessId, state: State = "ready") -> FleetRecord:
    record = new_record(name=name, run_id="r", model="m", launcher=launcher)
    record.state = state
    prepare_folder(home / "fleets" / name)
    write_record(home / "fleets" / name, record)
    return record


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    record = put(tmp_path, "a", ProcessId.own())
    assert read_record(tmp_path / "fleets" / "a") == record
    assert json.loads((tmp_path / "fleets" / "a" / "record.json").read_text())["state"] == "ready"


def test_a_live_record_of_dead_processes_is_corrected_and_the_rest_of_them_ended(tmp_path: Path) -> None:
    record = put(tmp_path, "a", dead())
    left_over = child()
    record.trays = [TrayEntry(tray=0, host=record.host, process=ProcessId.of(left_over.pid))]
    write_record(tmp_path / "fleets" / "a", record)
    (found,) = all_fleets(tmp_path)
    assert found.state == "failed" and found.ended_at > 0
    assert found.reason.startswith(f"launcher (pid {record.launcher.pid}) was killed, or the machine restarted, while")
    left_over.communicate()
    assert left_over.returncode == -9
    assert read_record(tmp_path / "fleets" / "a") == found
    assert claim.holder_of(tmp_path / "fleets" / "a") is None


def test_a_record_whose_launcher_holds_the_name_is_left_alone(tmp_path: Path) -> None:
    put(tmp_path, "a", ProcessId.own(), "loading")
    claim.take(tmp_path / "fleets" / "a", ProcessId.own())
    found = look(tmp_path / "fleets" / "a")
    assert found is not None and found.state == "loading"


def test_a_process_of_another_boot_is_never_killed(tmp_path: Path) -> None:
    bystander = child()
    record = put(tmp_path, "a", dead())
    record.trays = [TrayEntry(tray=0, host=record.host, process=ProcessId.of(bystander.pid))]
    record.boot_id = "another"
    write_record(tmp_path / "fleets" / "a", record)
    assert all_fleets(tmp_path)[0].state == "failed"
    assert bystander.poll() is None
    bystander.communicate(b"\n")


def test_without_a_name_the_only_living_fleet_is_meant(tmp_path: Path) -> None:
    put(tmp_path, "old", ProcessId.own(), "ended")
    assert one_fleet(tmp_path, None).name == "old"  # the only one there is
    put(tmp_path, "new", ProcessId.own())
    claim.take(tmp_path / "fleets" / "new", ProcessId.own())
    assert one_fleet(tmp_path, None).name == "new"
    assert one_fleet(tmp_path, "old").state == "ended"
    put(tmp_path, "newer", ProcessId.own())
    claim.take(tmp_path / "fleets" / "newer", ProcessId.own())
    with pytest.raises(ConfigError, match=r"2 fleets live in .*: say --name new or --name newer"):
        one_fleet(tmp_path, None)


def test_a_damaged_record_is_shown_as_such_and_hurts_no_other_fleet(tmp_path: Path) -> None:
    put(tmp_path, "a", ProcessId.own())
    put(tmp_path, "b", ProcessId.own(), "ended")
    (tmp_path / "fleets" / "a" / "record.json").write_text("{")
    damaged, whole = all_fleets(tmp_path)
    assert (damaged.name, damaged.state, whole.state) == ("a", "unreadable", "ended")
    assert re.match(r"fleet.home: .*/a/record.json is not a fleet record", damaged.reason)
    assert damaged.survivors() == []
    claim.take(tmp_path / "fleets" / "a", ProcessId.own())
    assert one_fleet(tmp_path, "a").launcher == ProcessId.own()


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_a_dead_fleet_reads_as_failed_though_its_record_cannot_be_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a", dead())
    put(tmp_path, "b", dead())
    for module, name in ((fleets, "write_record"), (claim, "_write_through")):
        monkeypatch.setattr(module, name, no_space)
        for found in all_fleets(tmp_path):
            assert found.state == "failed"
            assert found.reason.endswith("its record in fleet.home cannot be corrected: No space left on device")
    assert {path.name for path in tmp_path.glob("fleets/*/.*")} == set()


def test_the_home_is_given_or_from_the_environment_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert find_home("~/x", {}) == Path("/home/u/x")
    assert find_home(None, {"PEGAHPC_HOME": "/shared"}) == Path("/shared")
    assert find_home(None, {}) == Path("/home/u/.pegahpc")
