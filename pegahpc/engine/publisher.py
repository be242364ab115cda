"""What leaves the engine: at most one message a step and client, and a pulse for every client in between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from pegahpc.engine.pages import PagePool
from pegahpc.wire.messages import (
    HEARTBEAT_S,
    WIRE_VERSION,
    Attach,
    ExpertLoads,
    KvEvents,
    Load,
    PhaseTimes,
    RequestUpdate,
    StepOutputs,
    encode,
)

log = logging.getLogger(__name__)


class Outlet(Protocol):
    """Where messages go."""

    def send(self, client: bytes, payload: bytes) -> None:
        """Queue one message.

        Raises:
            ConnectionError: the client is gone.
        """


class Publisher:
    """Knows the clients that attached, and what each has heard."""

    def __init__(
        self,
        *,
        rank: int,
        pool: PagePool,
        read_load: Callable[[], Load],
        read_times: Callable[[], PhaseTimes],
        read_experts: Callable[[], ExpertLoads],
    ) -> None:
        self._rank = rank
        self._read_load = read_load
        self._pool = pool
        self._read_times = read_times
        self._read_experts = read_experts
        self._clients: set[bytes] = set()
        self._new_clients: set[bytes] = set()  # attached since the last message: they get a snapshot of names
        self._heartbeat_at_s = 0.0

    def attach(self, client: bytes, attach: Attach) -> None:
        """From now on this client hears of the rank; its first message comes at once."""
        if attach.version != WIRE_VERSION:
            log.warning("wire: a client speaks version %d, this rank %d; ignored", attach.version, WIRE_VERSION)
            return
        self._clients.add(client)
        self._new_clients.add(client)
        self._heartbeat_at_s = 0.0

    def publish(self, outlet: Outlet, *, step: int, updates: dict[bytes, list[RequestUpdate]]) -> None:
        """One message for each client that has updates; to all of them when the prefix cache changed or it is time."""
        stored, removed = self._pool.take_events()
        events = KvEvents(stored=stored, removed=removed) if stored or removed else None
        now_s = time.monotonic()
        is_due = now_s >= self._heartbeat_at_s
        if is_due:
            self._heartbeat_at_s = now_s + HEARTBEAT_S
        targets = self._clients | updates.keys() if is_due or events else updates.keys()
        if not targets:
            return
        load = self._read_load()
        times, experts = (self._read_times(), self._read_experts()) if is_due else (None, None)
        for client in targets:
            is_new = client in self._new_clients
            outputs = StepOutputs(
                rank=self._rank,
                step=step,
                load=load,
                updates=updates.get(client, []),
                kv_events=KvEvents(stored=self._pool.names, is_snapshot=True) if is_new else events,
                phases=times,
                experts=experts,
            )
            self._send(outlet, client, encode(outputs))
        self._new_clients -= targets

    def _send(self, outlet: Outlet, client: bytes, payload: bytes) -> None:
        """To a client that may be gone: it is forgotten, and one that comes back attaches anew."""
        try:
            outlet.send(client, payload)
        except ConnectionError:
            log.info("wire: a client is gone and hears no more of this rank")
            self._clients.discard(client)
