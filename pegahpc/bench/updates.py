"""Requests in the wire's own words, and the answers that its updates fill: without HTTP, without text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from pegahpc.bench.answers import Answer, Ask, Usage
from pegahpc.bench.records import STALLED
from pegahpc.wire.messages import Aborted, Failed, Finished, Rejected, Request, RequestUpdate, Sampling

SEED_MASK = (1 << 64) - 1


@dataclass
class Asking:
    """Makes wire requests with ids of their own.

    Args:
        stop_token_ids: none, if every answer is to have its full length.
    """

    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def request(self, ask: Ask) -> Request:
        """The request; its prompt must be token ids."""
        return Request(
            id=f"bench-{next(self._numbers)}",
            prompt_tokens=[token for token in ask.prompt if isinstance(token, int)],
            max_tokens=ask.output_tokens,
            sampling=Sampling(temperature=self.temperature, seed=ask.seed & SEED_MASK),
            stop_token_ids=self.stop_token_ids,
        )


@dataclass
class Open:
    """A request that has no terminal yet."""

    answer: Answer
    ended: asyncio.Event
    cached_tokens: int | None = None

    def take(self, update: RequestUpdate, at_s: float) -> None:
        """One step's update, which came at `at_s`."""
        answer = self.answer
        if update.cached_tokens is not None:
            self.cached_tokens = update.cached_tokens
        if update.tokens:
            answer.on_tokens(len(update.tokens), at_s)
            answer.tokens += update.tokens
        match update.terminal:
            case Finished(reason=reason, prompt_tokens=num_prompt, completion_tokens=num_output):
                answer.finish_reason, answer.ended_s = reason, at_s
                answer.usage = Usage(
                    prompt_tokens=num_prompt, completion_tokens=num_output, cached_tokens=self.cached_tokens
                )
            case Rejected(reason=rejection):
                answer.fail("rejected", str(rejection))
            case Failed(message=message):
                answer.fail("engine_failed", message)
            case Aborted():
                answer.fail("aborted")
            case None:
                pass


class Pending:
    """All open requests of a target. `deliver` may be called from a thread of its own.

    Args:
        stall_s: bound between two tokens of a request.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Open] = {}
        self._failure = ""

    def open(self, request_id: str, answer: Answer) -> Open:
        """From now on this request's updates go to `answer`."""
        entry = self._open[request_id] = Open(answer, asyncio.Event())
        return entry

    def close(self, request_id: str) -> bool:
        """No more updates are wanted; True if the request has no terminal yet, so that it must be aborted."""
        return self._open.pop(request_id, None) is not None

    def deliver(self, updates: Iterable[RequestUpdate], at_s: float) -> list[str]:
        """Fill the answers, wake who is done; the ids of those."""
        ended = []
        for update in updates:
            entry = self._open.get(update.id)
            if entry is None:
                continue  # given up meanwhile
            entry.take(update, at_s)
            if update.terminal is not None:
                self._open.pop(update.id, None)
                self._loop.call_soon_threadsafe(entry.ended.set)
                ended.append(update.id)
        return ended

    def fail_all(self, message: str) -> None:
        """Nothing more will come, for those who wait and for those who will."""
        self._failure = message
        for entry in list(self._open.values()):
            self._loop.call_soon_threadsafe(entry.ended.set)

    async def wait(self, entry: Open) -> None:
        """Until the terminal; a failure if no token came for `stall_s` after the first, or nothing will come."""
        while not entry.ended.is_set() and not self._failure:
            num_seen = len(entry.answer.event_s)
            try:
                async with asyncio.timeout(self._stall_s):
                    await entry.ended.wait()
            except TimeoutError:
                if num_seen and num_seen == len(entry.answer.event_s):
                    entry.answer.fail(STALLED, f"no token for {self._stall_s:g} s")
                    return
        if self._failure and entry.answer.ended_s is None:
            entry.answer.fail("engine_failed", self._failure)
