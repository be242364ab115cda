"""The head itself: what ends a fleet beside the losses that others report."""

from pathlib import Path

import pytest

from pegahpc.config import compose_fleet
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.head import Head
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.record import new_record, prepare_folder, read_record
from pegahpc.wire.keys import FleetSecret


def head_in(home: Path) -> Head:
    fleet = compose_fleet([f"fleet.home={home}", "topology=ep1"])
    prepare_folder(fleet.folder)
    boot = FleetBoot(fleet=fleet, run_id="r", fingerprint="f", num_experts=16)
    FleetSecret.create().save(boot.secret_path)
    return Head(boot, new_record(name="pegahpc", run_id="r", model="m", launcher=ProcessId.own()))


async def test_a_fleet_whose_watch_fails_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_in(tmp_path)

    def fail() -> None:
        raise ZeroDivisionError("no pulse")

    monkeypatch.setattr(head, "_found", fail)
    assert await head.run() == 1
    record = read_record(tmp_path / "fleets" / "pegahpc")
    assert record is not None and record.state == "failed"
    assert record.reason == "the head's watch over the fleet failed with ZeroDivisionError: no pulse"
