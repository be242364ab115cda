"""The head's hand on the fleet record: changes are many, writes are few and off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path

from pegahpc.launch.journal import add_event
from pegahpc.launch.messages import Hello, Progress, Pulse
from pegahpc.launch.phase_window import PhaseWindow
from pegahpc.launch.record import LIVE, FleetRecord, State, TrayEntry, write_record

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.25  # while the fleet loads
WRITE_WHEN_READY_EVERY_S = 1.0


class RecordKeeper:
    """Holds the record, notes what is heard, and writes it when it changed."""

    def __init__(self, folder: Path, record: FleetRecord) -> None:
        self.folder = folder
        self.record = record
        self._heard_s: dict[int, float] = {}  # rank -> monotonic time of its status block
        self._windows = [PhaseWindow() for _ in record.ranks]
        self._has_changed = asyncio.Event()
        self._closed = asyncio.Event()

    async def write_until_closed(self) -> None:
        """Write after changes, at most a few times a second; the last write is over when this returns."""
        while not self._closed.is_set():
            await self._has_changed.wait()
            self._has_changed.clear()
            self._age()
            await asyncio.to_thread(self._write)
            await self._pause(WRITE_WHEN_READY_EVERY_S if self.record.state == "ready" else WRITE_EVERY_S)
        await asyncio.to_thread(self._write)

    async def publish(self) -> None:
        """Write now; for what others wait for.

        Raises:
            OSError: it cannot be written.
        """
        await asyncio.to_thread(write_record, self.folder, self.record)

    def _write(self) -> None:
        """A fleet goes on when its file system does not: the next change is the next try."""
        try:
            write_record(self.folder, self.record)
        except OSError as error:
            log.warning("fleet.home: the record cannot be written: %s", error)

    def close(self) -> None:
        """Let `write_until_closed` write once more and end."""
        self._closed.set()
        self.touch()

    def touch(self) -> None:
        """Note that the record was changed."""
        self._has_changed.set()

    def enter(self, state: State, reason: str = "") -> None:
        """Move the fleet to another state, in the record and the event log."""
        self.record.state = state
        self.record.reason = reason
        if state == "ready":
            self.record.ready_at = time.time()
        if state not in LIVE:
            self.record.ended_at = time.time()  # the launcher's word follows, if it lives
        add_event(self.folder, state, **({"reason": reason} if reason else {}))
        self.touch()

    def welcome(self, tray: int, hello: Hello) -> None:
        """Note a tray and the addresses of its ranks."""
        self.record.trays.append(TrayEntry(tray=tray, host=hello.host, process=hello.process))
        for record in hello.records:
            entry = self.record.ranks[record.rank]
            entry.host, entry.process = hello.host, record.process
            entry.endpoint, entry.device = record.wire_endpoint, record.device
        self.touch()

    def note_progress(self, progress: Progress) -> None:
        """Note how far a rank's loading is."""
        entry = self.record.ranks[progress.rank]
        if entry.stage != progress.stage:
            add_event(self.folder, "stage", rank=progress.rank, stage=progress.stage)
        entry.stage, entry.progress = progress.stage, progress.fraction
        self.touch()

    def note_pulse(self, pulse: Pulse) -> None:
        """Note a rank's status block."""
        entry = self.record.ranks[pulse.rank]
        entry.step, entry.phase, entry.waiting_for = pulse.step, pulse.phase, pulse.waiting_for
        entry.num_running, entry.num_waiting = pulse.num_running, pulse.num_waiting
        heard_s = self._heard_s[pulse.rank] = time.monotonic() - pulse.age_s
        entry.phases, entry.recent_phases = pulse.phases, self._windows[pulse.rank].add(heard_s, pulse.phases)
        self.touch()

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), pause_s)

    def _age(self) -> None:
        now_s = time.monotonic()
        for rank, heard_s in self._heard_s.items():
            self.record.ranks[rank].last_seen_s = round(now_s - heard_s, 2)
