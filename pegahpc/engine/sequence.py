"""One request on its rank, from admission to its terminal."""

from __future__ import annotations

from dataclasses import dataclass

from pegahpc.engine.pages import RequestCache
from pegahpc.wire.messages import Request


class Sequence:
    """A request's tokens and how far they are computed. `tokens` is the prompt, then what was sampled."""

    def __init__(self, client: bytes, request: Request, queued_at_s: float) -> None:
        self.client = client
        self.request = request
        self.queued_at_s = queued_at_s
        self.tokens = list(request.prompt_tokens)
        self.cache: RequestCache | None = None  # set while running
        self.slot = -1  # row of the runner's page table, while running

    @property
    def key(self) -> tuple[bytes, str]:
        """Ids are the client's own; two clients may use the same."""
        return self.client, self.request.id

    @property
    def lifetime_tokens(self) -> int:
        """The most tokens that it can ever hold."""
        return len(self.request.prompt_tokens) + self.request.max_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose cache rows are written."""
        return self.cache.num_committed if self.cache else 0

    @property
    def num_remaining(self) -> int:
        """Tokens still to be computed before the next one can be sampled; 1 in decode."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt_tokens)


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one request in a step, from `start` on; all of them become history."""

    sequence: Sequence
    start: int
    num_rows: int

    @property
    def is_sampled(self) -> bool:
        """Whether the span reaches the last known token, so that its last row's logits give the next one."""
        return self.start + self.num_rows == len(self.sequence.tokens)
