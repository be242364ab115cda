"""The head's server: it collects hellos until the slices tile the world, and keeps each tray's connection.

A stranger costs one connection, one frame and a few seconds at most; it is logged and stalls nobody. When there are
too many, the one that has been silent longest goes: a tray says hello at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec

from pegahpc.launch.frames import NONCE_BYTES, FrameError, FrameStream, SignedStream
from pegahpc.launch.messages import (
    PROTOCOL_VERSION,
    HeadToTray,
    Hello,
    Loss,
    RankRecord,
    Refused,
    TrayToHead,
    decode_from_tray,
    encode,
)
from pegahpc.limited_log import LimitedLog
from pegahpc.wire.keys import FleetSecret

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
MAX_STRANGERS = 64  # connections without a hello at one time
NAME_MISSING_EVERY_S = 5.0


class Rendezvous:
    """Server and control channel of one fleet.

    Args:
        on_message: called with (tray, message) for all that admitted trays say.
        on_gone: called with a tray whose connection closed.
    """

    def __init__(
        self,
        *,
        secret: FleetSecret,
        fingerprint: str,
        num_trays: int,
        ranks_per_tray: int,
        on_message: Callable[[int, TrayToHead], None],
        on_gone: Callable[[int], None],
    ) -> None:
        self._secret = secret
        self._fingerprint = fingerprint
        self._num_trays = num_trays
        self._ranks_per_tray = ranks_per_tray
        self._on_message = on_message
        self._on_gone = on_gone
        self.hellos: dict[int, Hello] = {}
        self._streams: dict[int, SignedStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}  # whose hello is awaited, the oldest first
        self._limited = LimitedLog(log)
        self._refusals: list[str] = []
        self._has_changed = asyncio.Event()

    def _warn(self, stranger: str, why: str) -> None:
        self._limited.write(logging.WARNING, "strangers", "rendezvous: closed %s: %s", stranger, why)

    @asynccontextmanager
    async def open(self, host: str) -> AsyncIterator[str]:
        """Listen on a port that the kernel chooses; gives host:port, and closes everything at the end."""
        server = await asyncio.start_server(self._accept, host, 0)
        try:
            yield f"{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def gather(self, timeout_s: float) -> list[RankRecord]:
        """Wait until every tray has said hello; the records of all ranks, in order.

        Raises:
            TimeoutError: names the trays that are missing and whom the head refused.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.hellos) < self._num_trays:
                    await self._wait_for_change()
        except TimeoutError:
            refused = f"; refused: {'; '.join(self._refusals[-3:])}" if self._refusals else ""
            raise TimeoutError(f"rendezvous: {self.missing()} did not come within {timeout_s:g} s{refused}") from None
        return [record for _, hello in sorted(self.hellos.items()) for record in hello.records]

    def missing(self) -> str:
        """The trays that have not said hello."""
        width = self._ranks_per_tray
        absent = [tray for tray in range(self._num_trays) if tray not in self.hellos]
        return ", ".join(f"tray {tray} (ranks {tray * width}..{tray * width + width - 1})" for tray in absent)

    def send(self, tray: int, message: HeadToTray) -> None:
        """Queue a message to one tray; one that is gone is told nothing."""
        if tray in self._streams:
            self._streams[tray].send(encode(message))

    def broadcast(self, message: HeadToTray) -> None:
        """Queue a message to all trays."""
        for tray in list(self._streams):
            self.send(tray, message)

    @property
    def connected(self) -> set[int]:
        """Trays whose connection is open."""
        return set(self._streams)

    async def _wait_for_change(self) -> None:
        self._has_changed.clear()
        try:
            async with asyncio.timeout(NAME_MISSING_EVERY_S):
                await self._has_changed.wait()
        except TimeoutError:
            log.info("rendezvous: waiting for %s", self.missing())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Plain, not async: of its own tasks asyncio logs each cancellation as an error (3.11)."""
        task = asyncio.create_task(self._handle(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = FrameStream(reader, writer)
        try:
            stream = await self._converse(reader, writer)
        finally:
            await stream.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> FrameStream:
        """One connection from its nonce to its end."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        FrameStream(reader, writer).send(nonce)
        stream = SignedStream(reader, writer, secret=self._secret, nonce=nonce, is_head=True)
        try:
            with self._as_stranger(peer(writer)):
                first = await self._first_word(stream)
        except (FrameError, TimeoutError) as error:
            self._warn(peer(writer), str(error) or "no hello in time")
            writer.transport.abort()
            return stream
        if isinstance(first, Loss):
            self._on_message(-1, first)
        elif isinstance(first, Hello):
            await self._serve(first, stream)
        return stream

    @contextmanager
    def _as_stranger(self, who: str) -> Iterator[None]:
        """Take a stranger's place, from the oldest if there is none left."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest, name = next(iter(self._strangers.items()))
            del self._strangers[oldest]
            oldest.cancel()
            self._warn(name, f"no hello yet, and {MAX_STRANGERS} others came after")
        task = asyncio.current_task()
        assert task is not None
        self._strangers[task] = who
        try:
            yield
        finally:
            self._strangers.pop(task, None)

    async def _first_word(self, stream: SignedStream) -> TrayToHead | None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            payload = await stream.receive()
        return None if payload is None else _decode(payload)

    async def _serve(self, hello: Hello, stream: SignedStream) -> None:
        tray = hello.first_rank // self._ranks_per_tray
        if reason := self._objection(hello):
            log.warning("rendezvous: refused a tray: %s", reason)
            self._refusals.append(reason)
            stream.send(encode(Refused(reason=reason)))
            return
        log.info("rendezvous: tray %d is here: host %s, pid %d", tray, hello.host, hello.process.pid)
        self.hellos[tray], self._streams[tray] = hello, stream
        self._has_changed.set()
        try:
            while (payload := await stream.receive()) is not None:
                self._on_message(tray, _decode(payload))
        except FrameError as error:
            log.error("tray %d: its connection is closed: %s", tray, error)
        finally:
            del self._streams[tray]
            self._on_gone(tray)

    def _objection(self, hello: Hello) -> str:
        """Why a hello does not fit, or nothing."""
        width, world_size = self._ranks_per_tray, self._num_trays * self._ranks_per_tray
        first, last = hello.first_rank, hello.first_rank + hello.num_ranks - 1
        who = f"host {hello.host}, ranks {first}..{last}"
        if hello.version != PROTOCOL_VERSION:
            return f"{who}: speaks protocol {hello.version}, the head {PROTOCOL_VERSION}"
        if hello.world_size != world_size:
            return f"{who}: expects a world of {hello.world_size} ranks, the head {world_size}"
        if hello.fingerprint != self._fingerprint:
            return f"{who}: has another config, code or model ({hello.fingerprint}) than the head ({self._fingerprint})"
        if hello.num_ranks != width or first % width or not 0 <= first < world_size:
            return f"{who}: is no tray of {width} ranks in a world of {world_size}"
        if [record.rank for record in hello.records] != list(range(first, last + 1)):
            return f"{who}: brings records of ranks {[record.rank for record in hello.records]}"
        if taken := self.hellos.get(first // width):
            return f"{who}: these ranks are taken by host {taken.host} (pid {taken.process.pid})"
        return ""


def peer(writer: asyncio.StreamWriter) -> str:
    """host:port of the other end."""
    name = writer.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "a stranger"


def _decode(payload: bytes) -> TrayToHead:
    try:
        return decode_from_tray(payload)
    except msgspec.DecodeError as error:
        raise FrameError(f"not a message of ours: {error}") from None
