"""Fleets of real processes: of pretended ranks (no torch, ready within a second), or the whole thing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pegahpc.config import compose_fleet
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.children import python_module
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.prepare import prepare
from pegahpc.plan import resolve
from tests.launch.running_fleet import RunningFleet, pretend_programs

Start = Callable[..., RunningFleet]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts fleets of pretended ranks: `start("1:die", "topology=ep2", gateway="taken")`."""
    running: list[RunningFleet] = []

    def begin(*arguments: str, gateway: str = "") -> RunningFleet:
        acts = [argument for argument in arguments if ":" in argument]
        overrides = [argument for argument in arguments if ":" not in argument]
        plan = resolve(compose_fleet([f"fleet.home={tmp_path}", "gateway.port=0", *overrides]))
        launcher = subprocess.Popen(python_module("pegahpc.launch.local"), stdin=subprocess.PIPE)
        assert launcher.stdin is not None
        try:
            with launcher.stdin as stdin:
                boot: FleetBoot = prepare(plan, ProcessId.of(launcher.pid), pretend_programs(*acts, gateway=gateway))
                stdin.write(msgspec.msgpack.encode(boot))
        except BaseException:
            launcher.wait()
            raise
        running.append(RunningFleet(boot.folder, launcher))
        return running[-1]

    yield begin
    for fleet in running:
        fleet.end()


@pytest.fixture(scope="session")
def pegahpc() -> Run:
    """Runs the command line as a user would."""

    def run(*arguments: str, stdin: str = "", timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PEGAHPC_HOME"}
        environment |= {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
        return subprocess.run(
            python_module("pegahpc.launch.cli") + list(arguments),
            input=stdin,
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
        )

    return run
