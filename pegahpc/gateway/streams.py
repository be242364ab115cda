"""One request's updates on their way from the rank's reader to the handler: a list and at most one wake-up a step."""

from __future__ import annotations

import asyncio

from pegahpc.gateway.metrics import RequestTimes
from pegahpc.wire.messages import RequestUpdate, Terminal


class Stream:
    """The reader pushes, one handler takes. Nothing is lost, and nothing comes after the terminal.

    Args:
        wakes_each_step: False for a handler that needs the whole answer only: it wakes once, at the terminal.
    """

    def __init__(self, request_id: str, *, times: RequestTimes, wakes_each_step: bool) -> None:
        self.request_id = request_id
        self.terminal: Terminal | None = None
        self.times = times
        self._wakes_each_step = wakes_each_step
        self._pending: list[RequestUpdate] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, update: RequestUpdate, now_s: float) -> None:
        """One step's update; `now_s` is when its message came (monotonic)."""
        if self.terminal is not None:
            return
        self._pending.append(update)
        self.terminal = update.terminal
        self.times.on_update(update, now_s)
        if self._is_ready() and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[RequestUpdate]:
        """All updates since the last call, at least one, in order. Not to be called after the terminal was taken."""
        if not self._is_ready():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending = self._pending, []
        return taken

    def _is_ready(self) -> bool:
        return self.terminal is not None or (self._wakes_each_step and bool(self._pending))
