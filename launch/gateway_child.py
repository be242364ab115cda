"""The gateway as a child of the head tray: start, wait for its port, watch its pulse, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import Any

import msgspec

from pegahpc.gateway.boot import GatewayBoot, Listening, decode_word
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.children import Child, Program, clean_environment, has_ended, last_line
from pegahpc.launch.freeze import FreezeWatch
from pegahpc.launch.journal import log_path

log = logging.getLogger(__name__)

LISTEN_TIMEOUT_S = 60.0
FAREWELL_S = 1.0
KILL_BOUND_S = 5.0


class GatewayError(RuntimeError):
    """The gateway did not come up; the message says why."""


class GatewayChild:
    """One gateway process.

    Args:
        endpoints: the wire endpoint of rank 0, 1, ...
        still_s: how long it may be stopped, or its event loop not turn. The same as for a rank's status thread: what
            starves one starves the other. The longest gap between two turns was 0.3 s with 32 busy clients, 4 ranks
            and 32 busy processes on 2 cores (Xeon, 2026-12-01). Until the loop's first turn, imports and tokenizer
            take their time, which LISTEN_TIMEOUT_S bounds.
    """

    def __init__(self, boot: FleetBoot, endpoints: list[str], *, still_s: float) -> None:
        fleet = boot.fleet
        self._boot = GatewayBoot(
            fleet=fleet,
            endpoints=endpoints,
            secret_path=str(boot.secret_path),
            host=fleet.gateway.host or boot.bind_host,
            port=fleet.gateway.port,
        )
        environment = clean_environment(os.environ, num_threads=1, interface=fleet.cluster.interface)
        program = Program("gateway", boot.programs.gateway, environment, log_path(boot.folder, "gateway"))
        self.child = Child.spawn(program, has_output=True)
        self._still_s = still_s
        self._freeze = FreezeWatch(self.child.id, still_s)
        self._beat_s = float("inf")  # when its loop was last seen to turn; from the first beat on
        self._listening: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        self._hearing = asyncio.create_task(self._hear(), name="gateway-pulse")

    async def listen(self) -> str:
        """Hand over the document and wait for the port; the URL that ends in /v1.

        Raises:
            GatewayError: the gateway ended instead, or closed its standard output, or took too long.
        """
        await asyncio.to_thread(self.child.hand_over, msgspec.msgpack.encode(self._boot))
        either: set[asyncio.Future[Any]] = {self._listening, self._hearing}
        await asyncio.wait(either, timeout=LISTEN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._listening.done():
            said = self._listening.result()
            host = "127.0.0.1" if said.host in ("0.0.0.0", "::") else said.host
            return f"http://{host}:{said.port}/v1"
        if not self._hearing.done():
            raise GatewayError(f"the gateway did not listen within {LISTEN_TIMEOUT_S:g} s")
        await self.ended(KILL_BOUND_S)
        raise GatewayError(last_line(self.child.log_path) or self.child.describe())

    def stands_still(self) -> str:
        """How it stands still, if it has for longer than it may; else nothing."""
        silent_s = time.monotonic() - self._beat_s
        if not self._freeze.is_over() and silent_s <= self._still_s:
            return ""
        return (
            "is frozen" if self.child.id.is_frozen() else f"hangs: its event loop has not turned for {silent_s:.1f} s"
        )

    async def ended(self, timeout_s: float | None = None) -> bool:
        """Wait for the process's end; False when it still runs after `timeout_s`."""
        return await has_ended(self.child, timeout_s)

    async def drain(self, bound_s: float) -> str:
        """Ask for the end and wait for it; what had to be cut, or nothing."""
        self.child.signal(signal.SIGTERM)
        if await self.ended(bound_s):
            return "" if self.child.exit_code == 0 else self.child.describe()
        self.child.signal(signal.SIGKILL)
        await self.ended(KILL_BOUND_S)
        return f"the gateway still had work after {bound_s:g} s and was killed"

    async def fail(self) -> None:
        """Let it tell its clients that the fleet has failed, for a moment, if it can; then kill it."""
        self.child.signal(signal.SIGUSR1)
        if self.stands_still() or self.child.id.is_frozen() or not await self.ended(FAREWELL_S):
            self.child.signal(signal.SIGKILL)
            await self.ended(KILL_BOUND_S)
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)

    async def _hear(self) -> None:
        """Take what it says until it closes its standard output."""
        reader, stdout = asyncio.StreamReader(), self.child.process.stdout
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stdout
        )
        try:
            while line := await reader.readline():
                self._take(line)
        finally:
            transport.close()

    def _take(self, line: bytes) -> None:
        try:
            word = decode_word(line)
        except msgspec.DecodeError:
            log.warning("the gateway said %.80r, which is no word of its own", line)
            return
        self._beat_s = time.monotonic()
        if isinstance(word, Listening) and not self._listening.done():
            self._listening.set_result(word)
