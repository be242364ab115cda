"""Offers a batch of conversations to a target, in the closed or the open loop, and records every request.

In the open loop a request's clock starts when it was due, not when it was sent: a server that stalls is then charged
for all who would have come meanwhile (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pegahpc.bench.answers import Answer, Ask, Messages, Target
from pegahpc.bench.points import Closed, Point
from pegahpc.bench.prompts import Form, Prompt, join
from pegahpc.bench.records import NOT_SENT, TIMED_OUT, Record, failure_of, output_digest
from pegahpc.bench.workload import Conversation, Turn


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What holds for every request of a run.

    Args:
        timeout_s: absolute bound of one request, from when it is sent.
        has_exact_length: whether an answer that is shorter than asked is a failure.
        opening_tokens: that all prompts may begin with, besides what the workload shares (a chat template's).
    """

    timeout_s: float
    has_exact_length: bool
    think_s: float
    seed: int
    opening_tokens: int = 0


class Driver:
    """Drives one repeat of one point.

    Args:
        on_record: called with each record, as its request ends.
    """

    def __init__(
        self, target: Target, terms: Terms, *, point: Point, repeat: int, on_record: Callable[[Record], None]
    ) -> None:
        self._target = target
        self._terms = terms
        self._point, self._repeat = point, repeat
        self._on_record = on_record
        self._records: list[Record] = []

    async def run(self, conversations: Sequence[Conversation]) -> list[Record]:
        """All records, in the order of conversations and turns."""
        self._start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            if isinstance(self._point, Closed):
                queue = list(reversed(conversations))
                for _ in range(min(self._point.concurrency, len(queue))):
                    tasks.create_task(self._work_off(queue))
            else:
                for conversation in conversations:
                    due_s = self._start_s + conversation.at_s
                    await _sleep_until(due_s)
                    tasks.create_task(self._converse(conversation, due_s))
        return sorted(self._records, key=lambda record: (record.conversation, record.turn))

    async def _work_off(self, queue: list[Conversation]) -> None:
        """One client of the closed loop."""
        while queue:
            await self._converse(queue.pop(), None)

    async def _converse(self, conversation: Conversation, due_s: float | None) -> None:
        """All turns; `due_s` is when the first one should be sent, None: now. After a failure none is sent."""
        history = History(self._target.form)
        reusable = conversation.reusable_tokens
        if reusable is not None:
            reusable += self._terms.opening_tokens
        is_broken = False
        for number, turn in enumerate(conversation.turns):
            place = {"conversation": conversation.idx, "turn": number, "asked_tokens": turn.output_tokens}
            if is_broken:
                now_s = time.monotonic()
                self._keep(now_s, now_s, now_s, **place, failure=NOT_SENT, detail="an earlier turn failed")
                continue
            if number:
                due_s, reusable = time.monotonic() + self._terms.think_s, history.num_tokens
                await _sleep_until(due_s)
            ask = self._ask(history, conversation, turn)
            answer = await self._measure(ask, due_s=due_s, reusable_tokens=reusable, **place)
            history.add(turn, answer)
            is_broken = answer.failure is not None

    def _ask(self, history: History, conversation: Conversation, turn: Turn) -> Ask:
        name = f"bench-{self._terms.seed}-{self._point.key}-{self._repeat}-{conversation.idx}"
        return Ask(
            prompt=history.with_turn(turn),
            output_tokens=turn.output_tokens,
            session=name if len(conversation.turns) > 1 else "",
            seed=self._terms.seed + conversation.idx,
        )

    async def _measure(self, ask: Ask, *, due_s: float | None, **place: Any) -> Answer:
        """One request, sent now; its record is kept, and `failure` of its answer says why it does not count."""
        answer, sent_s = Answer(), time.monotonic()
        try:
            async with asyncio.timeout(self._terms.timeout_s):
                await self._target.ask(ask, answer)
        except TimeoutError:
            answer.fail(TIMED_OUT, f"not done within {self._terms.timeout_s:g} s")
        ended_s = answer.ended_s or time.monotonic()
        if (fault := failure_of(ask, answer, has_exact_length=self._terms.has_exact_length)) is not None:
            answer.fail(*fault)
        self._keep(sent_s if due_s is None else due_s, sent_s, ended_s, **place, **self._measured(answer))
        return answer

    def _measured(self, answer: Answer) -> dict[str, Any]:
        usage = answer.usage
        reason, detail = answer.failure or (None, "")
        return {
            "event_ms": [self._ms(at_s) for at_s in answer.event_s],
            "event_tokens": answer.event_tokens,
            "input_tokens": usage.prompt_tokens if usage else 0,
            "output_tokens": usage.completion_tokens if usage else 0,
            "cached_tokens": usage.cached_tokens if usage else None,
            "finish_reason": answer.finish_reason,
            "output_sha256": output_digest(answer),
            "failure": reason,
            "detail": detail,
        }

    def _keep(self, due_s: float, sent_s: float, ended_s: float, **fields: Any) -> None:
        record = Record(
            point=self._point.key,
            repeat=self._repeat,
            due_ms=self._ms(due_s),
            sent_ms=self._ms(sent_s),
            ended_ms=self._ms(ended_s),
            **fields,
        )
        self._records.append(record)
        self._on_record(record)

    def _ms(self, at_s: float) -> float:
        """Since the start, to the microsecond."""
        return round((at_s - self._start_s) * 1e3, 3)


class History:
    """What a conversation has said so far, in the form that its target takes."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._said: Prompt = [] if form == "tokens" else ""
        self._messages: Messages = []
        self.num_tokens: int | None = 0  # of it, by the server's count; None: it did not say

    def with_turn(self, turn: Turn) -> Prompt | Messages:
        """The whole prompt of the next request."""
        if self._form == "chat":
            return [*self._messages, {"role": "user", "content": str(turn.prompt)}]
        return join(self._said, turn.prompt) if self._said else turn.prompt

    def add(self, turn: Turn, answer: Answer) -> None:
        """A turn is over."""
        usage = answer.usage
        self.num_tokens = usage.prompt_tokens + usage.completion_tokens if usage else None
        if self._form == "tokens":
            assert isinstance(self._said, list) and isinstance(turn.prompt, list)
            self._said = [*self._said, *turn.prompt, *answer.tokens]
        elif self._form == "text":
            assert isinstance(self._said, str)
            self._said = f"{join(self._said, turn.prompt)}{''.join(answer.texts)}"
        else:
            answered = {"role": "assistant", "content": "".join(answer.texts)}
            self._messages += [{"role": "user", "content": str(turn.prompt)}, answered]


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(at_s - time.monotonic(), 0))
