"""One line of the raw results: a request, when its tokens came, and whether it counts."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import msgspec

from pegahpc.bench.answers import Answer, Ask

TIMED_OUT, STALLED, TRUNCATED, SHORT, USAGE_WRONG, NOT_SENT = (
    "timeout",
    "stalled",
    "truncated",
    "short_output",
    "usage_wrong",
    "not_sent",
)
GOOD_ENDINGS = ("stop", "length")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it was measured; every figure of a result follows from these lines alone.

    Args:
        due_ms: when it should have been sent, after the start of its repeat; in the open loop latency counts from here.
        event_ms: when tokens came; `event_tokens`: how many each time, empty where the server does not say.
        input_tokens, output_tokens, cached_tokens: by the server's usage; 0 or None when it failed before that.
        reusable_tokens: of the prompt, what this run itself may have left in a prefix cache; None: not countable.
        failure: why it does not count; None: it does.
    """

    point: str
    repeat: int
    conversation: int
    turn: int
    due_ms: float
    sent_ms: float
    ended_ms: float
    event_ms: list[float] = []
    event_tokens: list[int] = []
    asked_tokens: int
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    reusable_tokens: int | None = None
    finish_reason: str | None = None
    output_sha256: str = ""
    failure: str | None = None
    detail: str = ""

    @property
    def tokens_each(self) -> list[int] | None:
        """Tokens of each event: the server's counts, else one, if there are as many events as tokens. None: unknown."""
        if self.event_tokens:
            return self.event_tokens if len(self.event_tokens) == len(self.event_ms) else None
        return [1] * len(self.event_ms) if len(self.event_ms) == self.output_tokens else None

    @property
    def has_token_times(self) -> bool:
        """Whether each token has an event, and so a time, of its own."""
        return self.tokens_each is not None and set(self.tokens_each) == {1}

    @property
    def ttft_ms(self) -> float:
        """From the time it was due to its first token."""
        return self.event_ms[0] - self.due_ms

    @property
    def e2e_ms(self) -> float:
        """From the time it was due to the end of the stream."""
        return self.ended_ms - self.due_ms

    @property
    def gaps_ms(self) -> list[float]:
        """Between events; between tokens, if `has_token_times`."""
        return [later - sooner for sooner, later in pairwise(self.event_ms)]

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token after those of the first event; None where there are none, or counts are not known."""
        counts = self.tokens_each
        if counts is None or self.output_tokens == counts[0]:
            return None
        return (self.event_ms[-1] - self.event_ms[0]) / (self.output_tokens - counts[0])


def failure_of(ask: Ask, answer: Answer, *, has_exact_length: bool) -> tuple[str, str] | None:
    """Why an answer does not count, as (reason, detail); None: it does.

    Args:
        has_exact_length: the server was asked to ignore the end-of-text token, so every answer has its full length.
    """
    if answer.failure is not None:
        return answer.failure
    if answer.finish_reason is None:
        return TRUNCATED, "the stream ended without a finish_reason"
    if answer.finish_reason not in GOOD_ENDINGS:
        return f"finish_{answer.finish_reason}"[:40], ""
    usage = answer.usage
    if usage is None:
        return USAGE_WRONG, "the stream ended without usage"
    if fault := _usage_fault(ask, answer):
        return USAGE_WRONG, fault
    is_short = usage.completion_tokens < ask.output_tokens
    if is_short and (has_exact_length or answer.finish_reason == "length"):
        said = f"{usage.completion_tokens} of {ask.output_tokens} tokens, finish_reason {answer.finish_reason}"
        return SHORT, said
    return None


def _usage_fault(ask: Ask, answer: Answer) -> str:
    usage = answer.usage
    assert usage is not None
    num_events, counted = len(answer.event_s), sum(answer.event_tokens)
    if not 0 < usage.completion_tokens <= ask.output_tokens:
        return f"{usage.completion_tokens} tokens were counted, {ask.output_tokens} asked"
    if num_events == 0:
        return f"{usage.completion_tokens} tokens were counted, none was seen"
    if num_events > usage.completion_tokens or (answer.event_tokens and counted != usage.completion_tokens):
        return f"{usage.completion_tokens} tokens were counted, {counted or num_events} came"
    if isinstance(ask.prompt, list) and ask.prompt and isinstance(ask.prompt[0], int):
        if usage.prompt_tokens != len(ask.prompt):
            return f"a prompt of {len(ask.prompt)} tokens was counted as {usage.prompt_tokens}"
    elif usage.prompt_tokens < 1:
        return f"the prompt was counted as {usage.prompt_tokens} tokens"
    if not 0 <= (usage.cached_tokens or 0) <= usage.prompt_tokens:
        return f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were said to be cached"
    return ""


def output_digest(answer: Answer) -> str:
    """16 hex digits of what came: token ids where there are some, else text."""
    data = msgspec.msgpack.encode(answer.tokens) if answer.tokens else "".join(answer.texts).encode()
    return sha256(data).hexdigest()[:16]
