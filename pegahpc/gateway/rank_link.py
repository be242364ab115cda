"""The gateway's end of one rank: its socket, its pulse, its load, and the streams of its open requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from pegahpc.gateway.metrics import RankMetrics
from pegahpc.gateway.router import Router
from pegahpc.gateway.streams import Stream
from pegahpc.wire.messages import (
    Abort,
    Attach,
    ExpertLoads,
    Failed,
    PhaseTimes,
    RequestUpdate,
    StepOutputs,
    ToRank,
    decode_outputs,
    encode,
)

log = logging.getLogger(__name__)


class AttachError(RuntimeError):
    """A rank did not answer in time, or is not the one that its endpoint should be."""


class RankLink:
    """One rank as the gateway sees it: its socket, its pulse, its load, its open streams."""

    def __init__(
        self, rank: int, connect: Callable[[], zmq.asyncio.Socket], *, router: Router, metrics: RankMetrics
    ) -> None:
        self.rank = rank
        self.view = router.views[rank]
        self.metrics = metrics
        self.streams: dict[str, Stream] = {}
        self.step = -1  # before the first message
        self.phases = PhaseTimes()
        self.experts = ExpertLoads(num_steps=0, first_expert=0, layers=[])
        self.advanced_at_s = time.monotonic()
        self.has_answered = asyncio.Event()
        self.is_down = False  # from a failure of ours to the first message after it
        self._router = router
        self._connect = connect
        self._open()
        metrics.watch(
            lambda: self.view.load,
            num_prefix_pages=lambda: router.prefixes.num_pages(rank),
            totals=lambda: (max(self.step, 0), self.phases),
            experts=lambda: self.experts,
        )

    def send(self, message: ToRank) -> None:
        """Queue one message. Never blocks: the socket has no high-water mark, so libzmq takes it at once."""
        self._socket.send(encode(message))

    async def serve(self) -> None:
        """Attach, distribute the rank's messages and watch the connection until cancelled, or until one of them fails.

        Raises:
            AttachError: another rank answers.
        """
        self.send(Attach())
        tasks = [asyncio.create_task(work, name=f"rank-{self.rank}") for work in (self._read(), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            payload = await self._socket.recv()
            try:
                outputs = decode_outputs(payload)
            except msgspec.MsgspecError as error:
                log.error("rank %d: dropped a message of %d bytes: %s", self.rank, len(payload), error)
                continue
            if outputs.rank != self.rank:
                raise AttachError(f"the endpoint of rank {self.rank} is answered by rank {outputs.rank}")
            self.on_outputs(outputs)

    async def _watch(self) -> None:
        """Fail what is open when the connection breaks.

        The rank knows a client by its connection: what it still owes to the old one never comes, and the new one
        (libzmq makes it by itself) has to say that it is there.
        """
        while True:
            await self._monitor.recv_multipart()
            if self.streams:
                log.error("rank %d: the connection broke; %d requests fail", self.rank, len(self.streams))
            self.fail_all(f"The connection to rank {self.rank} broke.")
            self._router.on_down(self.rank)
            self.send(Attach())

    def take_down(self, message: str) -> None:
        """No new work for this rank until it speaks again; what is open on it fails."""
        self.is_down = True
        self.fail_all(message)
        self._router.on_down(self.rank)

    def reconnect(self) -> None:
        """A new socket in place of the old one."""
        self.close()
        self._open()

    def _open(self) -> None:
        self._socket = self._connect()
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)

    def close(self) -> None:
        """Close the socket and its monitor; what was not sent yet is dropped."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Take one step's message: pulse, load, and each request's update."""
        now_s = time.monotonic()
        if outputs.step > self.step:
            self.step, self.advanced_at_s = outputs.step, now_s
        if outputs.phases is not None:
            self.phases = outputs.phases
        if outputs.experts is not None:
            self.experts = outputs.experts
        self._router.on_report(outputs)
        self.is_down = False
        self.has_answered.set()
        num_tokens = 0
        for update in outputs.updates:
            stream = self.streams.get(update.id)
            if stream is None:
                continue  # aborted by us, and the rank did not know yet
            num_tokens += len(update.tokens)
            stream.push(update, now_s)
            if update.terminal is not None:
                del self.streams[update.id]
        if num_tokens:
            self.metrics.generation_tokens.inc(num_tokens)

    def silent_for_s(self) -> float:
        """Seconds since the rank's step counter moved."""
        return time.monotonic() - self.advanced_at_s

    def fail_all(self, message: str) -> None:
        """Give every open stream a terminal, and tell the rank, should it still listen."""
        now_s = time.monotonic()
        for request_id, stream in list(self.streams.items()):
            del self.streams[request_id]
            self.view.on_closed(request_id)
            stream.push(RequestUpdate(id=request_id, terminal=Failed(message)), now_s)
            self.send(Abort(request_id))
