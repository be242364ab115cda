"""What is asked of a target and what comes back, the same for HTTP, a rank's wire, and an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from pegahpc.bench.experts import Counts
from pegahpc.bench.prompts import Form, Prompt

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request.

    Args:
        prompt: token ids, a text, or a chat's messages; which of them is the target's `form`.
        output_tokens: how many are wanted, and with `ignore_eos` exactly so many.
        session: what keeps the turns of a conversation on one rank; "" for none.
        seed: of its draws, where the temperature is not 0.
    """

    prompt: Prompt | Messages
    output_tokens: int
    session: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # of the prompt; None: the server does not say


@dataclass
class Answer:
    """Filled while it comes, so that what came before a failure is there.

    Args:
        event_s: monotonic times at which tokens came.
        event_tokens: how many came each time, where the server says so; else empty.
        texts: in pieces; `tokens`: where the target gives ids.
        failure: reason and detail, of what went wrong on the way.
    """

    event_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: str | None = None
    ended_s: float | None = None  # when the end mark came; None: none came, or the target has none
    failure: tuple[str, str] | None = None

    def fail(self, reason: str, detail: str = "") -> None:
        """The first failure is the one that counts."""
        if self.failure is None:
            self.failure = reason, " ".join(detail.split())[:200]

    def on_tokens(self, count: int | None, at_s: float | None = None) -> None:
        """Tokens have come, now unless `at_s` says when; count None: nobody says how many."""
        self.event_s.append(time.monotonic() if at_s is None else at_s)
        if count is not None:
            self.event_tokens.append(count)


class Target(Protocol):
    """What is driven."""

    form: Form

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """Send one request and fill `answer` until its end. Cancelled: the request is given up, at the server too."""
        ...

    async def expert_counts(self) -> Counts | None:
        """The counters of its experts, everything until now included; None: it does not tell."""
        ...
