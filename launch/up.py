"""`pegahpc up`: here until the fleet ends, or detached until it is ready."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pegahpc.launch import claim
from pegahpc.launch.children import python_module
from pegahpc.launch.fleets import look
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.local import LocalLauncher
from pegahpc.launch.prepare import prepare
from pegahpc.launch.progress import ProgressView
from pegahpc.launch.record import FleetRecord
from pegahpc.plan import Plan

TICK_S = 0.1


def run_here(plan: Plan, when_ready: Callable[[FleetRecord], None]) -> FleetRecord:
    """Run the fleet as children of this process until it ends; Ctrl-C drains it, a second one ends it at once."""
    boot = prepare(plan, ProcessId.own())
    has_told = False
    with ProgressView() as view:

        def on_tick(record: FleetRecord) -> None:
            nonlocal has_told
            view.show(record)
            if record.state == "ready" and not has_told:
                has_told = True
                when_ready(record)

        return LocalLauncher(boot).run(on_tick)


def run_detached(plan: Plan) -> FleetRecord:
    """Start the fleet under a launcher in a session of its own; returns when it is ready or has failed.

    Ctrl-C before that ends the fleet. Afterwards it no longer needs the shell.
    """
    launcher = subprocess.Popen(
        python_module("pegahpc.launch.local"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    assert launcher.stdin is not None
    try:
        with launcher.stdin as stdin:  # closed without a word when the fleet is refused: then the launcher ends
            boot = prepare(plan, ProcessId.of(launcher.pid))
            stdin.write(msgspec.msgpack.encode(boot))
        with ProgressView() as view:
            return _wait(launcher, boot.folder, view)
    except BaseException:
        launcher.send_signal(signal.SIGQUIT)
        launcher.wait()
        raise


def _wait(launcher: subprocess.Popen[bytes], folder: Path, view: ProgressView) -> FleetRecord:
    while True:
        record = look(folder)
        assert record is not None, "prepare() wrote it"
        view.show(record)
        if record.state == "ready":
            return record
        if not record.is_live and claim.holder_of(folder) is None:  # the launcher has tidied up, too
            return record
        time.sleep(TICK_S)
        launcher.poll()
