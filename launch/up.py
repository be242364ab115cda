"""`pegahpc up`: here until the fleet ends, or detached until it is ready."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from pegahpc.config import ConfigError
from pegahpc.launch import claim
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.children import how_it_ended, last_line, python_module
from pegahpc.launch.fleets import look
from pegahpc.launch.gateway_child import LISTEN_TIMEOUT_S
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.journal import log_path
from pegahpc.launch.local import DRAIN_SIGNALS, LocalLauncher
from pegahpc.launch.prepare import prepare
from pegahpc.launch.progress import ProgressView
from pegahpc.launch.record import FleetRecord
from pegahpc.plan import Plan

TICK_S = 0.1
KILL_BOUND_S = 20.0  # for a launcher that is told to end its fleet at once
READY_MARGIN_S = 30.0  # over all bounds that the fleet itself keeps before it is ready


def run_here(plan: Plan, when_ready: Callable[[FleetRecord], None]) -> FleetRecord:
    """Run the fleet as children of this process until it ends; Ctrl-C drains it, a second one ends it at once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, DRAIN_SIGNALS)  # until the launcher can end what was laid out
    try:
        boot = prepare(plan, ProcessId.own())
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DRAIN_SIGNALS)
        raise
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

    Raises:
        ConfigError: the fleet is refused, or is not ready after all the bounds on its start.
    """
    with tempfile.TemporaryFile() as early:  # what the launcher says before it has a log
        launcher = subprocess.Popen(
            python_module("pegahpc.launch.local"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=early,
            bufsize=0,
            start_new_session=True,
            cwd="/",
        )
        assert launcher.stdin is not None
        try:
            with launcher.stdin as stdin:  # closed without a word when the fleet is refused: then the launcher ends
                boot = prepare(plan, ProcessId.of(launcher.pid))
                with suppress(BrokenPipeError):  # it has ended: `_wait` finds out how
                    stdin.write(msgspec.msgpack.encode(boot))
            with ProgressView() as view:
                return _wait(launcher, boot, view, early)
        except BaseException:
            _end(launcher)
            raise


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.send_signal(signal.SIGQUIT)
    try:
        launcher.wait(KILL_BOUND_S)
    except subprocess.TimeoutExpired:
        launcher.kill()  # its trays follow it


def _wait(launcher: subprocess.Popen[bytes], boot: FleetBoot, view: ProgressView, early: IO[bytes]) -> FleetRecord:
    bounds = boot.fleet.fleet
    bound_s = bounds.rendezvous_timeout_s + bounds.ready_timeout_s + LISTEN_TIMEOUT_S + READY_MARGIN_S
    deadline_s = time.monotonic() + bound_s
    death = partial(_death, launcher, log_path(boot.folder, "launcher"), early)
    while time.monotonic() < deadline_s:
        has_ended = launcher.poll() is not None  # before the look: what it wrote last is then seen
        record = look(boot.folder, death=death)
        if record is None:
            raise ConfigError(f"fleet.home: {boot.folder} was removed while the fleet started")
        view.show(record)
        if record.state == "ready":
            return record
        if has_ended:
            return _last_word(launcher, record)
        if record.state in ("ended", "failed") and claim.holder_of(boot.folder) is None:  # it has tidied up, too
            return record
        time.sleep(TICK_S)
    raise ConfigError(f"fleet.ready_timeout_s: the fleet is neither ready nor has it failed after {bound_s:g} s")


def _death(launcher: subprocess.Popen[bytes], log: Path, early: IO[bytes]) -> str:
    """How the launcher ended, with its last words. Its log has them all, though it may not have come so far itself."""
    early.seek(0)
    if said := early.read():
        with suppress(OSError), log.open("ab") as file:
            file.write(said)
    how = how_it_ended(launcher.poll())
    return f"{how} ({last_line(log)}; log: {log})" if log.exists() else how


def _last_word(launcher: subprocess.Popen[bytes], record: FleetRecord) -> FleetRecord:
    """The record of a launcher that is gone; it may not have been able to close it."""
    if record.state not in ("ended", "failed"):
        how = how_it_ended(launcher.returncode)
        record.reason = f"the launcher {how} and could not say why in fleet.home ({record.reason or record.state})"
        record.state = "failed"
    return record
