"""The head itself: what ends a fleet beside the losses that others report."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from pegahpc.config import compose_fleet
from pegahpc.launch import head as head_module
from pegahpc.launch import tray
from pegahpc.launch.boot import FleetBoot, TrayBoot
from pegahpc.launch.head import Head
from pegahpc.launch.head_link import HeadLink
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.messages import DEATH, Loss
from pegahpc.launch.prepare import prepare
from pegahpc.launch.record import new_record, prepare_folder, read_record
from pegahpc.plan import resolve
from pegahpc.wire.keys import FleetSecret
from tests.launch.running_fleet import pretend_programs


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


async def test_a_head_that_is_always_late_looks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_in(tmp_path)
    monkeypatch.setattr(head_module, "HEAD_LATE_S", -1.0)
    monkeypatch.setattr(head, "_found", lambda: Loss(reason="found", weight=DEATH))
    async with asyncio.timeout(10):
        assert await head.run() == 1
    record = read_record(tmp_path / "fleets" / "pegahpc")
    assert record is not None and record.reason == "found"


async def test_a_head_knows_of_a_launcher_that_is_gone_though_its_tray_never_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(boot: FleetBoot) -> HeadLink:
        await asyncio.sleep(1e9)
        raise AssertionError

    monkeypatch.setattr(HeadLink, "connect", never)
    plan = resolve(compose_fleet([f"fleet.home={tmp_path}", "gateway.port=0", "topology=ep2"]))
    boot = prepare(plan, ProcessId.own(), pretend_programs())
    with subprocess.Popen(["sleep", "60"]) as nobodys_parent:
        try:
            async with asyncio.timeout(20):
                assert await tray.run_tray(TrayBoot(boot=boot, tray=0, parent=nobodys_parent.pid)) == 1
        finally:
            nobodys_parent.kill()
    record = read_record(tmp_path / "fleets" / "pegahpc")
    assert record is not None and record.reason == f"launcher (pid {nobodys_parent.pid}) is gone"
