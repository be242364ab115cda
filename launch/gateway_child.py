"""The gateway as a child of the head tray: start, wait for its port, drain."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec

from pegahpc.gateway.boot import GatewayBoot, Listening
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.children import Child, Program, clean_environment, has_ended, last_line
from pegahpc.launch.journal import log_path

LISTEN_TIMEOUT_S = 60.0
FAREWELL_S = 1.0
KILL_BOUND_S = 5.0


class GatewayError(RuntimeError):
    """The gateway did not come up; the message says why."""


class GatewayChild:
    """One gateway process."""

    def __init__(self, boot: FleetBoot, endpoints: list[str]) -> None:
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

    async def listen(self) -> str:
        """Hand over the document and wait for the port; the URL that ends in /v1.

        Raises:
            GatewayError: the gateway ended instead, or said something else, or took too long.
        """
        await asyncio.to_thread(self.child.hand_over, msgspec.msgpack.encode(self._boot))
        assert self.child.process.stdout is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(self.child.process.stdout.readline), LISTEN_TIMEOUT_S)
            said = msgspec.json.decode(line, type=Listening)
        except TimeoutError:
            raise GatewayError(f"the gateway did not listen within {LISTEN_TIMEOUT_S:g} s") from None
        except msgspec.DecodeError:
            await self.ended(KILL_BOUND_S)
            raise GatewayError(last_line(self.child.log_path) or self.child.describe()) from None
        host = "127.0.0.1" if said.host in ("0.0.0.0", "::") else said.host
        return f"http://{host}:{said.port}/v1"

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
        if self.child.id.is_frozen() or not await self.ended(FAREWELL_S):
            self.child.signal(signal.SIGKILL)
            await self.ended(KILL_BOUND_S)
