"""`up --detach`: what is said when the launcher that it starts is gone before the fleet is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegahpc.config import compose_fleet
from pegahpc.launch import claim
from pegahpc.launch import up as starting
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.prepare import prepare
from pegahpc.launch.record import read_record
from pegahpc.plan import Plan, resolve
from tests.launch.conftest import Run
from tests.launch.running_fleet import until

# Python imports this first in every process that finds it on its path.
BROKEN = """
import os, sys
if sys.orig_argv[-1] == "pegahpc.launch.local":
    {before}
    sys.stderr.write("ImportError: libthing.so.3: cannot open shared object file\\n")
    os._exit(3)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return resolve(compose_fleet([f"fleet.home={tmp_path / 'home'}", "gateway.port=0", "topology=ep1"]))


def break_launcher(monkeypatch: pytest.MonkeyPatch, folder: Path, before: str) -> None:
    """The real launcher cannot start; `before` is what it does first."""
    (folder / "sitecustomize.py").write_text(BROKEN.format(before=before))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def assert_said(folder: Path, state: str, reason: str) -> None:
    log = folder / "logs" / "launcher.log"
    assert state == "failed" and reason.startswith("launcher (pid ")
    assert reason.endswith(
        " exited with code 3 (ImportError: libthing.so.3: cannot open shared object file;"
        f" log: {log}) while the fleet was starting"
    )
    assert log.read_text().startswith("ImportError: ")
    after = read_record(folder)
    assert after is not None and (after.state, after.reason) == (state, reason)
    assert claim.holder_of(folder) is None


def test_a_launcher_that_is_gone_before_its_document_comes(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_late(plan: Plan, launcher: ProcessId) -> FleetBoot:
        until(lambda: not launcher.is_alive())
        return prepare(plan, launcher)

    break_launcher(monkeypatch, tmp_path, "pass")
    monkeypatch.setattr(starting, "prepare", prepare_late)
    record = starting.run_detached(plan)
    assert_said(plan.fleet.folder, record.state, record.reason)


def test_a_launcher_that_takes_its_document_and_cannot_start_is_one_line(
    pegahpc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_launcher(monkeypatch, tmp_path, "sys.stdin.buffer.read()")
    ran = pegahpc("up", "-d", "--home", str(tmp_path), "topology=ep1", "gateway.port=0")
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("pegahpc: ")]
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    name, state, reason = line.removeprefix("pegahpc: fleet ").split(" ", 2)
    assert name == "pegahpc"
    assert_said(tmp_path / "fleets" / "pegahpc", state.removesuffix(":"), reason)
