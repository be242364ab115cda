"""Whether the client itself kept up: how late its event loop wakes. A late client measures its own lateness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

TICK_S = 0.02
LIMIT_MS = 20.0  # p99 above it: the figures may be the client's


class ClientLag:
    """How late each wake-up was, in milliseconds."""

    def __init__(self) -> None:
        self._late_ms: list[float] = []

    @property
    def p99_ms(self) -> float:
        """0 before the first wake-up."""
        return round(float(np.percentile(self._late_ms, 99, method="linear")), 3) if self._late_ms else 0.0

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_ms.append((time.monotonic() - due_s) * 1e3)


@asynccontextmanager
async def watched_client() -> AsyncIterator[ClientLag]:
    """Watches the running event loop inside the block."""
    lag = ClientLag()
    task = asyncio.create_task(lag.watch(), name="client-lag")
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
