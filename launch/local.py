"""cluster=local: one process that spawns the tray processes here, waits for them, and proves that nothing is left.

`pegahpc up` does this itself; `pegahpc up --detach` starts this module in a session of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import psutil

from pegahpc.config import ConfigError
from pegahpc.launch import claim
from pegahpc.launch.boot import FleetBoot, TrayBoot
from pegahpc.launch.children import Child, Program, adopt_orphans, clean_environment, last_line
from pegahpc.launch.fleets import kill_survivors
from pegahpc.launch.freeze import BOUND_SHARE, FreezeWatch
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.journal import add_event, log_path
from pegahpc.launch.record import FleetRecord, drop_temp_files, read_record, write_record
from pegahpc.log_lines import configure_logging

log = logging.getLogger("pegahpc.launch.local")  # __name__ is __main__ here

TICK_S = 0.1
HEAD_FOLLOWS_S = 8.0  # after another tray has ended, for the head to tear down and write down why
TRAYS_FOLLOW_S = 0.5  # after the head has ended
KILL_BOUND_S = 5.0  # for the kernel to end all that is killed
ORPHAN_GRACE_S = 0.3
DRAIN_MARGIN_S = 30.0  # over fleet.drain_timeout_s, for ranks to leave and trays to end
DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LocalLauncher:
    """Parent of all trays of one fleet."""

    def __init__(self, boot: FleetBoot) -> None:
        self._boot = boot
        self._trays: list[Child] = []
        self._ended: list[Child] = []
        self._is_draining = self._is_killed = False
        self._cut = ""  # why this process has ended the trays itself
        self._deadline_s = self._gone_by_s = float("inf")
        self._last_record: FleetRecord | None = None
        self._record_trouble = ""

    def run(self, on_tick: Callable[[FleetRecord], None]) -> FleetRecord:
        """Start the trays and stay until the last has ended; the final record.

        Args:
            on_tick: called about ten times a second with the newest record.
        """
        adopt_orphans()
        self._listen_to_signals()
        try:
            self._trays = [self._spawn(tray) for tray in range(self._boot.fleet.topology.num_trays)]
            if self._is_draining:  # asked before there was anybody to tell
                self._trays[0].signal(signal.SIGTERM)
            self._wait(on_tick)
        finally:
            self._kill()
            record = self._close()
        on_tick(record)
        return record

    def drain(self, *_: object) -> None:
        """Let the fleet finish its work and leave; asked a second time: end it now."""
        if self._is_draining:
            self.end_now()
            return
        self._is_draining = True
        self._deadline_s = time.monotonic() + self._boot.fleet.fleet.drain_timeout_s + DRAIN_MARGIN_S
        if self._trays:
            self._trays[0].signal(signal.SIGTERM)

    def end_now(self, *_: object) -> None:
        """Kill the trays; their ranks and the gateway die with them."""
        self._is_killed = True
        self._deadline_s = 0.0

    def _listen_to_signals(self) -> None:
        for signum in DRAIN_SIGNALS:
            signal.signal(signum, self.drain)
        signal.signal(signal.SIGQUIT, self.end_now)
        signal.signal(signal.SIGTSTP, self._stay)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DRAIN_SIGNALS)  # trays must not inherit that they are blocked

    def _stay(self, *_: object) -> None:
        """Ctrl-Z: the trays would end a fleet whose launcher stands still."""
        log.warning("a fleet in the foreground cannot be suspended; Ctrl-C drains it, up --detach runs it elsewhere")

    def _spawn(self, tray: int) -> Child:
        who = f"tray {tray}"
        environment = clean_environment(os.environ, num_threads=1, interface=self._boot.fleet.cluster.interface)
        program = Program(who, self._boot.programs.tray, environment, log_path(self._boot.folder, who))
        child = Child.spawn(program, is_parent=True)  # the head writes down why the fleet ends
        child.hand_over(msgspec.msgpack.encode(TrayBoot(boot=self._boot, tray=tray, parent=os.getpid())))
        return child

    def _wait(self, on_tick: Callable[[FleetRecord], None]) -> None:
        """Until all trays have ended, or one has and the others do not follow, or a frozen one holds up the head."""
        bound_s = self._boot.fleet.gateway.stall_s * BOUND_SHARE
        freezes = [FreezeWatch(tray.id, bound_s) for tray in self._trays]
        while len(self._note_ends()) < len(self._trays):
            record = self._record()
            if self._ended:
                knows = self._trays[0].is_alive and record.state != "starting"  # else the head cannot tear down
                follow_s = HEAD_FOLLOWS_S if knows else TRAYS_FOLLOW_S
                self._deadline_s = min(self._deadline_s, time.monotonic() + follow_s)
            frozen = [tray for tray, freeze in zip(self._trays, freezes, strict=True) if freeze.is_over()]
            if frozen and (frozen[0] is self._trays[0] or record.state == "starting"):  # else the head sees to it
                self._cut = f"{frozen[0].who} (pid {frozen[0].id.pid}) is frozen"
                return
            if time.monotonic() > self._deadline_s:
                self._cut = "the fleet did not end in time and was killed"
                return
            on_tick(record)
            time.sleep(TICK_S)

    def _note_ends(self) -> list[Child]:
        """The trays that have ended by themselves, in the order in which that was seen."""
        self._ended += [tray for tray in self._trays if tray not in self._ended and not tray.is_alive]
        return self._ended

    def _kill(self) -> None:
        """Kill the trays, and with them what they started; all of that has one bound."""
        self._note_ends()
        self._gone_by_s = time.monotonic() + KILL_BOUND_S
        for tray in self._trays:
            tray.signal(signal.SIGKILL)
        for tray in self._trays:
            try:
                tray.process.wait(max(0.0, self._gone_by_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("%s cannot be killed", tray.describe())  # `_close` says that something is left

    def _close(self) -> FleetRecord:
        """Reap every descendant, write the ending, give the name back."""
        record = self._record()
        left = kill_survivors(record, bound_s=max(0.0, self._gone_by_s - time.monotonic()))
        if not _end_orphans(self._gone_by_s):
            left.append("a process that the record does not name")
        self._judge(record)
        if left:
            record.state, record.reason = "failed", f"{record.reason}; still running: {', '.join(left)}"
        record.ended_at = time.time()
        try:
            self._write_ending(record, left)
        except OSError as error:
            log.error("fleet.home: the ending cannot be written (%s): %s", error, record.reason)
        return record

    def _write_ending(self, record: FleetRecord, left: list[str]) -> None:
        drop_temp_files(self._boot.folder)
        write_record(self._boot.folder, record)
        add_event(self._boot.folder, "closed", state=record.state, reason=record.reason, left=left)
        claim.release(self._boot.folder, ProcessId.own())

    def _judge(self, record: FleetRecord) -> None:
        """Complete the head's verdict by what only the trays' parent can see."""
        killed = [tray for tray in self._ended if (tray.exit_code or 0) < 0]
        if self._is_killed:
            record.state, record.reason = "ended", "stopped at once"
        elif record.is_live and self._is_draining and self._has_head_left():
            is_early = record.state in ("starting", "loading")
            record.state, record.reason = "ended", "stopped before it was ready" if is_early else "drained"
        elif killed and (record.is_live or "its connection closed" in record.reason):
            record.state, record.reason = "failed", f"{killed[0].describe()}; log: {killed[0].log_path}"
        elif record.is_live:
            said = [f"{tray.describe()}: {last_line(tray.log_path)}" for tray in self._ended if tray.exit_code]
            record.state, record.reason = "failed", "; ".join(said) or self._cut or "the trays left without a word"

    def _has_head_left(self) -> bool:
        """Whether tray 0 left as it was told: before it could listen to SIGTERM, by that signal itself."""
        head = self._trays[0]
        return head in self._ended and head.exit_code in (0, -signal.SIGTERM)

    def _record(self) -> FleetRecord:
        """The newest record; while there is none, or what is there cannot be read, the last one that could."""
        try:
            self._last_record = read_record(self._boot.folder) or self._last_record
        except (OSError, ConfigError) as error:
            self._complain_of_record(str(error))
        assert self._last_record is not None, "the record was written before the launcher started"
        return self._last_record

    def _complain_of_record(self, error: str) -> None:
        """Once for each trouble, though the record is read ten times a second."""
        if error != self._record_trouble:
            log.warning("fleet.home: the record cannot be read: %s", error)
        self._record_trouble = error


def _end_orphans(by_s: float) -> bool:
    """Reap adopted descendants; True when the kernel knows none any more.

    Ranks and the gateway die with their parents. What they have started (a compiler, a template's renderer) may not:
    it is asked to end, so that it tidies up, and killed a moment later.
    """
    kill_from_s = time.monotonic() + ORPHAN_GRACE_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            continue
        now_s = time.monotonic()
        if now_s > by_s:
            return False
        for orphan in psutil.Process().children():
            orphan.send_signal(signal.SIGTERM if now_s < kill_from_s else signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """The detached launcher: reads its document, logs to the fleet's folder, runs the fleet."""
    document = sys.stdin.buffer.read()
    if not document:
        raise SystemExit("the caller ended before it said what to do")
    boot = msgspec.msgpack.decode(document, type=FleetBoot)
    path = log_path(boot.folder, "launcher")
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
    configure_logging()
    record = LocalLauncher(boot).run(lambda _: None)
    log.info("fleet %s %s: %s", record.name, record.state, record.reason)
    sys.exit(0 if record.state == "ended" else 1)


if __name__ == "__main__":
    main()
