"""One request on its rank, from admission to its terminal."""

from __future__ import annotations

from dataclasses import dataclass

from pegahpc.engine.logit_edits import LogitEdits
from pegahpc.engine.request_cache import RequestCache
from pegahpc.page_names import next_name, page_names
from pegahpc.wire.messages import Request


class Sequence:
    """A request's tokens and how far they are computed. `tokens` is the prompt, then what was sampled."""

    def __init__(
        self, client: bytes, request: Request, queued_at_s: float, *, page_tokens: int = 0, root: bytes = b""
    ) -> None:
        self.client = client
        self.request = request
        self.queued_at_s = queued_at_s
        self.tokens = list(request.prompt_tokens)
        self.cache: RequestCache | None = None  # set while running
        self.slot = -1  # row of the runner's block table, while running
        self.edits: LogitEdits | None = None  # set while running, where the request asks for any
        self._page_tokens, self._root = page_tokens, root  # 0: pages have no names, the prefix cache is off
        self._names = page_names(self.tokens, page_tokens, root) if page_tokens else []

    @property
    def key(self) -> tuple[bytes, str]:
        """Ids are the client's own; two clients may use the same."""
        return self.client, self.request.id

    @property
    def lifetime_tokens(self) -> int:
        """The most tokens that it can ever hold."""
        return len(self.request.prompt_tokens) + self.request.max_tokens

    @property
    def reusable_names(self) -> list[bytes]:
        """Names of the prompt's full pages that a hit may cover: at least one token is always computed.

        None where the prompt's logprobs are wanted: they need the logits of every prompt token.
        """
        if not self._page_tokens or self.request.prompt_logprobs is not None:
            return []
        return self._names[: (len(self.request.prompt_tokens) - 1) // self._page_tokens]

    def proven_names(self) -> list[bytes] | None:
        """Names of all full committed pages, when there are more than were sealed; else None."""
        if not self._page_tokens or self.cache is None:
            return None
        num_full = self.cache.num_committed // self._page_tokens
        if num_full <= self.cache.num_sealed:
            return None
        while len(self._names) < num_full:
            first = len(self._names) * self._page_tokens
            parent = self._names[-1] if self._names else self._root
            self._names.append(next_name(parent, self.tokens[first : first + self._page_tokens]))
        return self._names[:num_full]

    def append(self, token: int) -> None:
        """One more sampled token."""
        self.tokens.append(token)
        if self.edits is not None:
            self.edits.add(token)

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
    def stop(self) -> int:
        """The position after the last row: the one whose token the last row's logits are for."""
        return self.start + self.num_rows

    @property
    def is_sampled(self) -> bool:
        """Whether the span reaches the last known token, so that its last row's logits give the next one."""
        return self.stop == len(self.sequence.tokens)
