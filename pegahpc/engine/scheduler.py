"""What a step computes: admission by full lifetime in arrival order, decode rows first, then prefill chunks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from pegahpc.engine.pages import PagePool
from pegahpc.engine.request_cache import RequestCache
from pegahpc.engine.sequence import Sequence, Span


class Scheduler:
    """Holds every request of the rank that has no terminal yet. Emits nothing: the engine does.

    Args:
        max_num_seqs: requests that run at once; as many decode rows must fit one step.
        max_rows_per_step: rows of all spans of a step.
        max_prefill_rows: rows that prefill may take of a step while others decode.
    """

    def __init__(self, pool: PagePool, *, max_num_seqs: int, max_rows_per_step: int, max_prefill_rows: int) -> None:
        self.pool = pool
        self.waiting: OrderedDict[tuple[bytes, str], Sequence] = OrderedDict()
        self.running: OrderedDict[tuple[bytes, str], Sequence] = OrderedDict()
        self._free_slots = deque(range(max_num_seqs))
        self._max_rows = max_rows_per_step
        self._max_prefill_rows = max_prefill_rows

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request that `admission.refusal` found possible."""
        self.waiting[sequence.key] = sequence

    def find(self, key: tuple[bytes, str]) -> Sequence | None:
        """A request that has no terminal yet."""
        return self.running.get(key) or self.waiting.get(key)

    def admit(self, on_admit: Callable[[Sequence], None]) -> None:
        """Move requests from the queue's front to running while slots and pages for their whole life are there."""
        while self.waiting and self._free_slots:
            sequence = next(iter(self.waiting.values()))
            cache = RequestCache(self.pool)
            if not cache.reserve(sequence.lifetime_tokens, sequence.reusable_names):
                return
            del self.waiting[sequence.key]
            sequence.cache, sequence.slot = cache, self._free_slots.popleft()
            self.running[sequence.key] = sequence
            on_admit(sequence)

    def plan(self) -> list[Span]:
        """The next step's spans, chunks of prompts first (rows of a step: chunks, decode rows, padding), with room."""
        decoding = [Span(s, s.num_computed, 1) for s in self.running.values() if s.num_remaining == 1]
        budget = min(self._max_prefill_rows, self._max_rows - len(decoding))
        chunks: list[Span] = []
        for sequence in self.running.values():
            if sequence.num_remaining > 1 and budget > 0:
                num_rows = min(sequence.num_remaining, budget)
                chunks.append(Span(sequence, sequence.num_computed, num_rows))
                budget -= num_rows
        spans = chunks + decoding
        for span in spans:
            assert span.sequence.cache is not None
            span.sequence.cache.extend(span.num_rows)
        return spans

    def remove(self, sequence: Sequence) -> None:
        """Forget a request, whatever its state; its pages and slot are free at once."""
        self.waiting.pop(sequence.key, None)
        if self.running.pop(sequence.key, None) is not None:
            assert sequence.cache is not None
            sequence.cache.drop()
            self._free_slots.append(sequence.slot)
