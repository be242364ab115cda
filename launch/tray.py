"""A tray process: `python -P -m pegahpc.launch.tray`. It alone supervises the rank processes of its tray.

Tray 0 is the head: it runs the fleet monitor (`head.py`) beside its own ranks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from pegahpc.launch.boot import TrayBoot
from pegahpc.launch.children import has_ended
from pegahpc.launch.frames import FrameError
from pegahpc.launch.freeze import BOUND_SHARE, FreezeWatch
from pegahpc.launch.head import Head
from pegahpc.launch.head_link import HeadLink
from pegahpc.launch.identity import ProcessId, boot_id
from pegahpc.launch.messages import (
    DEATH,
    ERROR,
    HEARTBEAT_S,
    LAUNCHER_GONE,
    Go,
    Heartbeat,
    Hello,
    Kill,
    Loss,
    Pulse,
    RankRecord,
    RankToTray,
    Refused,
    Stop,
    Store,
    World,
)
from pegahpc.launch.rank_slot import RankSlot
from pegahpc.launch.record import read_record
from pegahpc.log_lines import configure_logging

log = logging.getLogger("pegahpc.launch.tray")  # __name__ is __main__ here

REAP_BOUND_S = 5.0
PARENT_GONE_GRACE_S = 1.0  # for the head to write down why


class Tray:
    """The ranks of one tray and the way to the head.

    Args:
        tell_head: takes losses in the head's own process; None: they travel over the connection to the head.
    """

    def __init__(self, boot: TrayBoot, tell_head: Callable[[Loss], None] | None = None) -> None:
        self._boot = boot
        self._tell_head = tell_head
        self._slots: list[RankSlot] = []
        self._link: HeadLink | None = None
        self._unsent: list[Loss] = []  # lost before there was a connection
        self._is_loading, self._is_leaving = True, False
        self._launcher = ProcessId.of(boot.parent)
        self.is_launcher_frozen = False
        self._over = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Start the ranks, join the fleet, pass messages on until the end; the exit code."""
        width = self._boot.boot.fleet.topology.ranks_per_tray
        self._slots = [await RankSlot.start(self._boot, local_rank) for local_rank in range(width)]
        tasks = [asyncio.create_task(self._hear_rank(slot)) for slot in self._slots]
        tasks += [asyncio.create_task(work) for work in (self._join(), self._beat(), self._watch_parent())]
        for task in tasks:
            task.add_done_callback(self._fall_with)
        try:
            return int(await self._over)
        finally:
            await self._end(tasks)

    def lose(self, loss: Loss) -> None:
        """Tell the head of a loss, as soon as there is a connection."""
        log.error("%s%s", f"rank {loss.rank} " if loss.rank is not None else "", loss.reason)
        if self._tell_head is not None:
            self._tell_head(loss)  # at once, be there a connection or not
        elif self._link is not None:
            self._link.send(loss)
        else:
            self._unsent.append(loss)

    def leave_head(self) -> None:
        """The head has ended; a tray that has not reached it yet would look for it in vain."""
        self._finish(1, "the head has ended")

    async def _join(self) -> None:
        """Say hello when all ranks have bound their ports, then obey the head."""
        records = await self._records()
        link = await HeadLink.connect(self._boot.boot)
        if records:
            link.send(self._hello(records))
        self._link = link
        for loss in self._unsent:
            link.send(loss)
        try:
            while (order := await link.hear()) is not None:
                self._obey(order)
            self._finish(1, "the head is gone")
        except FrameError as error:
            self._finish(1, f"the head's connection is broken: {error}")

    async def _records(self) -> list[RankRecord]:
        """The records of all ranks, or none when a rank was lost before."""
        records = asyncio.gather(*(slot.record for slot in self._slots))
        while not records.done() and not self._unsent:
            await asyncio.wait({records}, timeout=0.02)
        if records.done():
            return records.result()
        records.cancel()
        return []

    def _hello(self, records: list[RankRecord]) -> Hello:
        return Hello(
            world_size=self._boot.boot.fleet.topology.world_size,
            first_rank=self._slots[0].rank,
            num_ranks=len(self._slots),
            fingerprint=self._boot.boot.fingerprint,
            host=socket.gethostname(),
            boot_id=boot_id(),
            process=ProcessId.own(),
            records=records,
        )

    def _obey(self, order: object) -> None:
        match order:
            case World() | Store():
                self._tell_ranks(order)
            case Go():
                self._is_loading = False
                self._tell_ranks(order)
            case Stop():
                self._is_leaving = True
                self._tell_ranks(order)
            case Kill():
                self._finish(1, "the head says kill")
            case Refused():
                self._finish(1, f"the head refused this tray: {order.reason}")

    def _tell_ranks(self, message: World | Store | Go | Stop) -> None:
        for slot in self._slots:
            slot.tell(message)

    async def _hear_rank(self, slot: RankSlot) -> None:
        """One rank's words from its first to its end."""
        try:
            while (message := await slot.hear()) is not None:
                self._take(slot, message)
        except (FrameError, msgspec.DecodeError) as error:
            log.error("rank %d sent what is no message: %s", slot.rank, error)
        if await has_ended(slot.child, REAP_BOUND_S):
            self._rank_ended(slot)
        else:
            self.lose(self._loss(slot, "closed its connection but does not end", ERROR))

    def _take(self, slot: RankSlot, message: RankToTray) -> None:
        match message:
            case RankRecord():
                slot.record.set_result(message)
            case Pulse():
                slot.note(message)
            case Loss():
                slot.has_complained = True
                self.lose(message)
            case _ if self._link is not None:
                self._link.send(message)

    def _rank_ended(self, slot: RankSlot) -> None:
        code = slot.child.exit_code
        assert code is not None
        if code and not slot.has_complained:
            how = slot.child.describe().partition(") ")[2]
            self.lose(self._loss(slot, how, DEATH if code < 0 else ERROR))
        elif code == 0 and not self._is_leaving:
            self.lose(self._loss(slot, "left without being asked", ERROR))
        if self._is_leaving and not any(other.child.is_alive for other in self._slots):
            self._finish(0, "all ranks have left")

    def _loss(self, slot: RankSlot, reason: str, weight: int) -> Loss:
        return Loss(rank=slot.rank, pid=slot.child.id.pid, reason=reason, weight=weight)

    async def _beat(self) -> None:
        """Four times a second, the ranks' status blocks to the head."""
        frozen_after_s = self._boot.boot.fleet.gateway.stall_s * BOUND_SHARE
        freezes = [FreezeWatch(slot.child.id, frozen_after_s) for slot in self._slots]
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for slot, freeze in zip(self._slots, freezes, strict=True):
                if freeze.is_over() and self._is_loading:  # later the head sees its silence
                    self._is_loading = False
                    self.lose(self._loss(slot, "is frozen", DEATH))
            if self._link is not None:
                pulses = [pulse for slot in self._slots if (pulse := slot.aged_pulse()) is not None]
                self._link.send(Heartbeat(pulses=pulses))

    async def _watch_parent(self) -> None:
        """End with the launcher, even if its death signal was lost, or if it is stopped for long."""
        freeze = FreezeWatch(self._launcher, self._boot.boot.fleet.gateway.stall_s * BOUND_SHARE)
        while os.getppid() == self._boot.parent and not freeze.is_over():
            await asyncio.sleep(HEARTBEAT_S)
        self.is_launcher_frozen = freeze.is_over()
        how = "is frozen" if self.is_launcher_frozen else "is gone"
        self.lose(Loss(reason=f"launcher (pid {self._boot.parent}) {how}", weight=LAUNCHER_GONE))
        await asyncio.sleep(PARENT_GONE_GRACE_S)
        self._finish(1, f"the launcher {how}")

    def _finish(self, exit_code: int, why: str) -> None:
        if not self._over.done():
            log.info("tray %d ends: %s", self._boot.tray, why)
            self._over.set_result(exit_code)

    def _fall_with(self, task: asyncio.Task[None]) -> None:
        """A task that fails takes the tray along."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Kill and reap what is left of the ranks, then leave the head."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            slot.child.signal(signal.SIGKILL)
        for slot in self._slots:
            if not await has_ended(slot.child, REAP_BOUND_S):
                log.error("%s cannot be killed", slot.child.describe())
            await slot.close()
        if self._link is not None:
            await self._link.close()


async def run_tray(boot: TrayBoot) -> int:
    """Run one tray, and the head if it is the first; the exit code."""
    loop = asyncio.get_running_loop()
    if boot.tray:
        loop.add_signal_handler(signal.SIGTERM, log.info, "SIGTERM: the head drains the fleet")
        return await Tray(boot).run()
    record = read_record(boot.boot.folder)
    assert record is not None and record.run_id == boot.boot.run_id
    head = Head(boot.boot, record)
    tray = Tray(boot, head.lose)

    def on_sigterm() -> None:
        if os.getppid() == boot.parent:  # else it is the death signal, and the tray says so
            head.stop()

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)

    async def lead() -> int:
        code = await head.run()
        tray.leave_head()
        return code

    head_code, _ = await asyncio.gather(lead(), tray.run())
    if tray.is_launcher_frozen:
        os.kill(boot.parent, signal.SIGKILL)  # it is this process's parent still, so the pid is its own
    return head_code


def main() -> None:
    """Run one tray from the document on standard input."""
    configure_logging()
    document = sys.stdin.buffer.read()
    if not document:
        raise SystemExit("the launcher ended before it said what to do")
    boot = msgspec.msgpack.decode(document, type=TrayBoot)
    if os.getppid() != boot.parent:
        raise SystemExit("the launcher is gone")
    sys.exit(asyncio.run(run_tray(boot)))


if __name__ == "__main__":
    main()
