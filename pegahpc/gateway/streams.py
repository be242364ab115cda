"""Updates on their way from a rank's reader to the handler: a list a sequence, and at most one wake-up a step."""

from __future__ import annotations

import asyncio

from pegahpc.gateway.metrics import RequestTimes
from pegahpc.wire.messages import Finished, RequestUpdate, Terminal


class Mailbox:
    """Where one handler waits for all sequences of its generation.

    Args:
        num_sequences: how many streams will post here.
        wakes_each_step: False for a handler that needs whole answers only: it wakes at the last terminal, or at one
            that is no success.
    """

    def __init__(self, num_sequences: int, *, wakes_each_step: bool) -> None:
        self.wakes_each_step = wakes_each_step
        self._num_running = num_sequences
        self._posted: list[Stream] = []
        self._has_failed = False
        self._waiter: asyncio.Future[None] | None = None

    def post(self, stream: Stream) -> None:
        """A stream has something new, for the first time since it was taken."""
        self._posted.append(stream)

    def on_terminal(self, terminal: Terminal) -> None:
        """A stream has its last update."""
        self._num_running -= 1
        self._has_failed |= not isinstance(terminal, Finished)

    def wake(self) -> None:
        """Let the handler go on, if it waits and there is enough for it."""
        if self._waiter is not None and not self._waiter.done() and self._is_ready():
            self._waiter.set_result(None)

    async def take(self) -> list[Stream]:
        """The streams that have something new, at least one. Not to be called after all terminals were taken."""
        if not self._is_ready():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        posted, self._posted = self._posted, []
        return posted

    def _is_ready(self) -> bool:
        return bool(self._posted) and (self.wakes_each_step or not self._num_running or self._has_failed)


class Stream:
    """One sequence's updates: the reader pushes, one handler takes. Nothing is lost, nothing comes after the terminal.

    Args:
        index: the sequence's place in its generation.
    """

    def __init__(self, request_id: str, rank: int, *, times: RequestTimes, mailbox: Mailbox, index: int) -> None:
        self.request_id = request_id
        self.rank = rank
        self.index = index
        self.terminal: Terminal | None = None
        self.times = times
        self._mailbox = mailbox
        self._pending: list[RequestUpdate] = []

    def push(self, update: RequestUpdate, now_s: float) -> None:
        """One step's update; `now_s` is when its message came (monotonic)."""
        if self.terminal is not None:
            return
        if not self._pending:
            self._mailbox.post(self)
        self._pending.append(update)
        self.times.on_update(update, now_s)
        if update.terminal is not None:
            self.terminal = update.terminal
            self._mailbox.on_terminal(update.terminal)
        self._mailbox.wake()

    def take(self) -> list[RequestUpdate]:
        """All updates since the last call, in order."""
        taken, self._pending = self._pending, []
        return taken
