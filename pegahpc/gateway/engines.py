"""The client's side of the wire, all ranks together: attach, send each request where the router says, watch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Sequence

import zmq.asyncio

from pegahpc.gateway.errors import ApiError
from pegahpc.gateway.metrics import GatewayMetrics
from pegahpc.gateway.rank_link import AttachError, RankLink
from pegahpc.gateway.router import RouteHint, Router
from pegahpc.gateway.streams import Mailbox, Stream
from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.messages import HEARTBEAT_S, Abort, Request
from pegahpc.wire.sockets import connect_to_rank

log = logging.getLogger(__name__)

RECONNECT_S = (0.5, 10.0)  # the first wait for a rank whose reader failed, and the longest


class Engines:
    """All ranks. Use as an async context: entering waits until every rank has answered.

    Args:
        affinity_load_bound: how much more load a request may find where its prefix is cached (`router.choose`).
        stall_s: a rank whose step has not moved for so long gets no new work and its requests fail.
        attach_timeout_s: bound of the wait at the start.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        secret: FleetSecret,
        *,
        metrics: GatewayMetrics,
        affinity_load_bound: int,
        stall_s: float,
        attach_timeout_s: float,
    ) -> None:
        self._stall_s = stall_s
        self._attach_timeout_s = attach_timeout_s
        self._context = zmq.asyncio.Context()
        self._router = router = Router(len(endpoints), load_bound=affinity_load_bound)
        self.links = [
            RankLink(
                rank,
                functools.partial(connect_to_rank, self._context, endpoint, secret),
                router=router,
                metrics=metrics.for_rank(rank),
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Engines:
        for link in self.links:
            self._tasks.append(asyncio.create_task(_keep_up(link), name=f"rank-{link.rank}-link"))
        try:
            await self._wait_for_answers()
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks.append(asyncio.create_task(self._watch(), name="stall-watch"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.links:
            link.close()
        self._context.term()

    def open(self, request: Request, *, hint: RouteHint, arrived_s: float, mailbox: Mailbox, index: int) -> Stream:
        """Send a request to the rank that the router chooses. Close the stream.

        Args:
            mailbox: where its updates are announced, as those of number `index`.

        Raises:
            ApiError: 503 when no rank makes progress.
        """
        link = self._choose(hint)
        times = link.metrics.times(arrived_s, num_prompt_tokens=len(request.prompt_tokens))
        stream = Stream(request.id, link.rank, times=times, mailbox=mailbox, index=index)
        link.streams[request.id] = stream
        self._router.on_sent(link.rank, request.id, hint)
        link.send(request)
        return stream

    def close(self, stream: Stream) -> None:
        """Nobody listens any more; before its terminal that aborts the request on its rank."""
        link = self.links[stream.rank]
        self._router.on_closed(link.rank, stream.request_id)
        if link.streams.pop(stream.request_id, None) is not None:
            link.send(Abort(stream.request_id))

    def stalled(self) -> list[RankLink]:
        """The ranks whose step has not moved for `stall_s`, and those that cannot be read."""
        return [link for link in self.links if link.is_down or link.silent_for_s() > self._stall_s]

    def fail_all(self, message: str) -> None:
        """End every open request with a clear word."""
        for link in self.links:
            link.fail_all(message)

    @property
    def num_open(self) -> int:
        """Requests without a terminal."""
        return sum(len(link.streams) for link in self.links)

    def _choose(self, hint: RouteHint) -> RankLink:
        stalled = self.stalled()
        alive = [link for link in self.links if link not in stalled] if stalled else self.links
        if not alive:
            raise ApiError(503, "No rank of the fleet makes progress.", code="engine_stalled")
        rank, reason = self._router.route(hint, live=[link.rank for link in alive])
        self.links[rank].metrics.routed[reason].inc()
        return self.links[rank]

    async def _wait_for_answers(self) -> None:
        deadline = time.monotonic() + self._attach_timeout_s
        while silent := [link for link in self.links if not link.has_answered.is_set()]:
            ended = [task for task in self._tasks if task.done()]
            if ended:
                await ended[0]
            if time.monotonic() > deadline:
                names = ", ".join(str(link.rank) for link in silent)
                raise AttachError(f"no answer from rank {names} within {self._attach_timeout_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(silent[0].has_answered.wait(), HEARTBEAT_S)

    async def _watch(self) -> None:
        """Fail what waits for a rank that does not step. Time that this process itself slept is not held against it."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)
            slept_s = time.monotonic() - before_s - HEARTBEAT_S
            if slept_s > 1:
                for link in self.links:
                    link.advanced_at_s += slept_s
            for link in self.stalled():
                if link.streams:
                    log.error(
                        "rank %d: no step for %.1f s; %d requests fail", link.rank, self._stall_s, len(link.streams)
                    )
                    link.fail_all(f"Rank {link.rank} has made no progress for {self._stall_s:g} s.")


async def _keep_up(link: RankLink) -> None:
    """Serve a rank's link until cancelled. A failure is said at once and fails what is open; then it is made again.

    Raises:
        AttachError, or what else ended the link, while the rank has not answered for the first time.
    """
    wait_s, longest_s = RECONNECT_S
    while True:
        began_s = time.monotonic()
        try:
            await link.serve()
        except Exception:
            if not link.has_answered.is_set():
                raise
            log.exception("rank %d: its messages cannot be read; %d requests fail", link.rank, len(link.streams))
            link.take_down(f"The gateway cannot read the messages of rank {link.rank}.")
        wait_s = RECONNECT_S[0] if time.monotonic() - began_s > longest_s else min(wait_s * 2, longest_s)
        await asyncio.sleep(wait_s)
        link.reconnect()
        log.info("rank %d: connecting again", link.rank)
