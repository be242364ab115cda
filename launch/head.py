"""The fleet monitor of tray 0: meet, load, serve, drain; or name what failed and end everything."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Set
from dataclasses import dataclass
from typing import Any, Literal

from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.freeze import BOUND_SHARE
from pegahpc.launch.gateway_child import GatewayChild, GatewayError
from pegahpc.launch.journal import log_path
from pegahpc.launch.keeper import RecordKeeper
from pegahpc.launch.losses import Losses, describe
from pegahpc.launch.messages import (
    DEATH,
    HEARTBEAT_S,
    TRAY_GONE,
    Go,
    Heartbeat,
    Kill,
    Loss,
    Progress,
    Pulse,
    Ready,
    Stop,
    Store,
    TrayToHead,
    World,
)
from pegahpc.launch.record import FleetRecord, GatewayEntry, RankEntry
from pegahpc.launch.rendezvous import Rendezvous
from pegahpc.launch.watchdog import Watchdog
from pegahpc.wire.keys import FleetSecret

log = logging.getLogger(__name__)

KILL_BOUND_S = 1.0  # for all trays to have reaped their ranks; after that their launcher kills them
LEAVE_BOUND_S = 15.0  # for all ranks to leave through the chain
HEAD_LATE_S = 1.0
GATEWAY_MARGIN_S = 5.0  # over fleet.drain_timeout_s, before the gateway is killed


class StartError(RuntimeError):
    """The fleet cannot start; the message says why."""


@dataclass(frozen=True)
class Ending:
    """How a fleet ended."""

    state: Literal["ended", "failed"]
    reason: str


class Head:
    """Runs one fleet from the rendezvous to the end."""

    def __init__(self, boot: FleetBoot, record: FleetRecord) -> None:
        self._boot = boot
        topology = boot.fleet.topology
        record.ranks = [
            RankEntry(rank=rank, tray=rank // topology.ranks_per_tray, log=str(log_path(boot.folder, f"rank {rank}")))
            for rank in range(topology.world_size)
        ]
        self._keeper = RecordKeeper(boot.folder, record)
        self._losses = Losses()
        self._bound_s = boot.fleet.gateway.stall_s * BOUND_SHARE
        self._watchdog = Watchdog(self._bound_s)
        self._num_ready = 0
        self._all_ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._is_going = self._is_leaving = False
        self._late: list[str] = []  # what failed on the way out
        self._gateway: GatewayChild | None = None
        self._server = Rendezvous(
            secret=FleetSecret.load(boot.secret_path),
            fingerprint=boot.fingerprint,
            num_trays=topology.num_trays,
            ranks_per_tray=topology.ranks_per_tray,
            on_message=self._hear,
            on_gone=self._tray_gone,
        )

    def stop(self) -> None:
        """Drain and end; before the fleet is ready: end."""
        self._stop.set()

    def lose(self, loss: Loss) -> None:
        """Take in a loss that this process's own tray saw."""
        self._hear(0, loss)

    async def run(self) -> int:
        """Serve until stopped or failed; the exit code of the head tray."""
        writer = asyncio.create_task(self._keeper.write_until_closed())
        try:
            async with self._server.open(self._boot.bind_host) as address:
                self._keeper.record.rendezvous = address
                ending = await self._live()
                await self._tear_down(ending)
        finally:
            self._keeper.close()
            await writer
        return 0 if ending.state == "ended" else 1

    async def _publish(self) -> None:
        """Write what others wait for: the head's address, and that the fleet is ready."""
        try:
            await self._keeper.publish()
        except OSError as error:
            home = self._boot.fleet.fleet.home
            raise StartError(f"fleet.home: {home} cannot be written ({error.strerror or error})") from None

    async def _live(self) -> Ending:
        """The fleet's life or its first loss, whichever ends first."""
        life = asyncio.create_task(self._start_and_serve())
        culprit = asyncio.create_task(self._losses.culprit())
        try:
            await asyncio.wait({life, culprit}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                return life.result()
            loss = await culprit
            return Ending("failed", describe(loss, self._keeper.record))
        except (TimeoutError, GatewayError, StartError) as error:
            return Ending("failed", str(error))
        finally:
            for task in (life, culprit):
                task.cancel()
            await asyncio.gather(life, culprit, return_exceptions=True)

    async def _start_and_serve(self) -> Ending:
        watch = asyncio.create_task(self._watch())
        watch.add_done_callback(self._note_blindness)
        try:
            if not await self._unless_stopped(self._start()):
                return Ending("ended", "stopped before it was ready")
            await self._stop.wait()
            return Ending("ended", await self._drain())
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _note_blindness(self, watch: asyncio.Task[None]) -> None:
        """A fleet that nobody looks after any more ends, and says why."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            log.error("the watch over the fleet has failed", exc_info=error)
            reason = f"the head's watch over the fleet failed with {type(error).__name__}: {error}"
            self._losses.add(Loss(reason=reason, weight=DEATH))

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do some work unless the fleet is stopped meanwhile; whether it was done."""
        doing, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return doing.done()
        finally:
            doing.cancel()
            stopped.cancel()
            await asyncio.gather(doing, stopped, return_exceptions=True)

    async def _start(self) -> None:
        await self._publish()
        bounds = self._boot.fleet.fleet
        records = await self._server.gather(bounds.rendezvous_timeout_s)
        for tray, hello in sorted(self._server.hellos.items()):
            self._keeper.welcome(tray, hello)
        self._server.broadcast(World(records=records))
        self._keeper.enter("loading")
        try:
            await asyncio.wait_for(self._all_ready.wait(), bounds.ready_timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"fleet.ready_timeout_s: {self._not_ready()} after {bounds.ready_timeout_s:g} s"
            ) from None
        self._server.broadcast(Go())
        self._is_going = True
        self._watchdog.expect_ranks(self._boot.fleet.topology.world_size, time.monotonic())
        endpoints = [record.wire_endpoint for record in records]
        self._gateway = GatewayChild(self._boot, endpoints, still_s=self._bound_s)
        entry = GatewayEntry(process=self._gateway.child.id)
        self._keeper.record.gateway = entry
        entry.url = await self._gateway.listen()
        self._keeper.enter("ready")
        await self._publish()

    def _not_ready(self) -> str:
        waiting = [entry for entry in self._keeper.record.ranks if entry.stage != "ready"]
        return "not ready: " + ", ".join(f"rank {entry.rank} ({entry.stage} {entry.progress:.0%})" for entry in waiting)

    async def _watch(self) -> None:
        """Look after the gateway's process, the trays' words and the ranks' progress, until one is lost."""
        has_waited = False
        while not self._is_leaving:
            asleep_s = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            is_late = time.monotonic() - asleep_s > HEARTBEAT_S + HEAD_LATE_S
            if is_late and not has_waited:  # this process was held up itself: first read what has come meanwhile
                has_waited = True
                continue
            has_waited = False
            if loss := self._found():
                self._losses.add(loss)
                return

    def _found(self) -> Loss | None:
        """What is lost, if anything; a gateway that ends before it serves says itself why."""
        now_s = time.monotonic()
        if how := self._gateway_trouble():
            return Loss(reason=how, weight=DEATH)
        for tray in self._server.connected:
            self._watchdog.expect_tray(tray, now_s)
        if frozen := self._watchdog.silent_tray(now_s):
            return Loss(reason=f"{self._tray_name(frozen[0])} {frozen[1]}", weight=DEATH)
        if self._is_going and (culprit := self._watchdog.verdict(now_s)):
            return Loss(rank=culprit[0], reason=culprit[1], weight=DEATH)
        return None

    def _gateway_trouble(self) -> str:
        if self._gateway is None:
            return ""
        child = self._gateway.child
        if child.is_alive:
            how = self._gateway.stands_still()
            return f"{child.who} (pid {child.id.pid}) {how}; log: {child.log_path}" if how else ""
        is_missed = self._keeper.record.state == "ready" and not self._stop.is_set()
        return f"{child.describe()}; log: {child.log_path}" if is_missed else ""

    async def _drain(self) -> str:
        """Let running work finish, then let the ranks leave together; what to say about it."""
        assert self._gateway is not None
        self._keeper.enter("draining")
        cut = await self._gateway.drain(self._boot.fleet.fleet.drain_timeout_s + GATEWAY_MARGIN_S)
        self._is_leaving = True
        self._server.broadcast(Stop())
        if not await self._trays_gone(LEAVE_BOUND_S):
            self._late.append(f"ranks of {self._still_there()} had not left after {LEAVE_BOUND_S:g} s and were killed")
        return "; ".join(["drained", *([cut] if cut else []), *self._late])

    async def _tear_down(self, ending: Ending) -> None:
        """End everything that is left, and write the ending."""
        self._is_leaving = True
        if ending.state == "failed":
            log.error("the fleet failed: %s", ending.reason)
            self._keeper.enter("failed", ending.reason)
        self._server.broadcast(Kill())
        farewell = asyncio.create_task(self._end_gateway())
        deaf = self._watchdog.quiet_trays(time.monotonic())  # frozen ones are killed by their launcher
        if not await self._trays_gone(KILL_BOUND_S, but=deaf):
            log.error("still there after %g s: %s", KILL_BOUND_S, self._still_there())
        await farewell
        if ending.state == "ended":
            self._keeper.enter("ended", ending.reason)

    async def _end_gateway(self) -> None:
        """Have it tell its clients; after a drain it has ended long since."""
        if self._gateway is not None:
            await self._gateway.fail()

    async def _trays_gone(self, bound_s: float, *, but: Set[int] = frozenset()) -> bool:
        try:
            async with asyncio.timeout(bound_s):
                while self._server.connected - but:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True

    def _still_there(self) -> str:
        return ", ".join(f"tray {tray}" for tray in sorted(self._server.connected))

    def _hear(self, tray: int, message: TrayToHead) -> None:
        match message:
            case Progress():
                self._keeper.note_progress(message)
            case Ready():
                self._watchdog.note(Pulse(rank=message.rank), time.monotonic())  # its first is yet to come
                self._num_ready += 1
                if self._num_ready == self._boot.fleet.topology.world_size:
                    self._all_ready.set()
            case Store():
                self._server.broadcast(message)
            case Heartbeat():
                self._watchdog.note_tray(tray, time.monotonic())
                for pulse in message.pulses:
                    self._watchdog.note(pulse, time.monotonic())
                    self._keeper.note_pulse(pulse)
            case Loss() if self._is_leaving:
                self._late.append(describe(message, self._keeper.record))
            case Loss():
                self._losses.add(message)

    def _tray_gone(self, tray: int) -> None:
        if self._is_leaving:
            return
        self._losses.add(Loss(reason=f"{self._tray_name(tray)} is gone: its connection closed", weight=TRAY_GONE))

    def _tray_name(self, tray: int) -> str:
        hello = self._server.hellos[tray]
        ranks = f"ranks {hello.first_rank}..{hello.first_rank + hello.num_ranks - 1}"
        return f"tray {tray} (pid {hello.process.pid}, host {hello.host}, {ranks})"
