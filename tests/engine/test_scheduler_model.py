"""Scheduler, page pool and admission together, against a plain model: every order of arrivals, aborts and steps."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pegahpc.engine.admission import refusal
from pegahpc.engine.pages import PADDING_PAGE, PagePool
from pegahpc.engine.scheduler import Scheduler
from pegahpc.engine.sequence import Sequence, Span
from pegahpc.page_names import root_name
from pegahpc.vocabulary import Vocabulary
from pegahpc.wire.messages import CacheBudget, Request

PAGE_TOKENS, NUM_PAGES = 4, 12  # 11 to give
ROOT = root_name(b"salt")
STOP = 3


class Serving(RuleBasedStateMachine):
    """Few beginnings and few tokens, so that prefixes are shared; few pages and slots, so that both run out.

    The model: names in arrival order, the tokens of each, and what each page holds.
    """

    @initialize(slots=st.integers(1, 4), more_rows=st.integers(0, 6), prefill=st.integers(1, 9))
    def begin(self, slots: int, more_rows: int, prefill: int) -> None:
        self.slots, self.max_rows, self.prefill = slots, slots + more_rows, prefill
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=slots, max_rows_per_step=self.max_rows, max_prefill_rows=prefill
        )
        self.queue: list[Sequence] = []  # in arrival order
        self.running: list[Sequence] = []  # in the order of admission
        self.computed: dict[str, int] = {}
        self.content: dict[int, list[int]] = {}
        self.num_arrived = 0

    @rule(start=st.sampled_from([0, 1]), length=st.integers(1, 14), tail=st.integers(0, 2), num=st.integers(1, 40))
    def arrive(self, start: int, length: int, tail: int, num: int) -> None:
        prompt = [start] * length + [2] * tail
        request = Request(id=str(self.num_arrived), prompt_tokens=prompt, max_tokens=num)
        self.num_arrived += 1
        bound = (NUM_PAGES - 1) * PAGE_TOKENS
        reason = refusal(request, vocabulary=Vocabulary(9), max_model_len=100, cache_tokens=bound)
        if len(prompt) + num > bound:
            assert reason == CacheBudget(tokens=len(prompt) + num, limit=bound)
            return
        assert reason is None
        sequence = Sequence(b"c", request, 0.0, page_tokens=PAGE_TOKENS, root=ROOT)
        self.scheduler.add(sequence)
        self.queue.append(sequence)

    @precondition(lambda self: self.queue or self.running)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        known = self.queue + self.running
        self._forget(known[which % len(known)])

    @rule(token=st.sampled_from([0, 1, 2, STOP]))
    def step(self, token: int) -> None:
        self._admit()
        spans = self.scheduler.plan()
        self._check_plan(spans)
        for span in spans:
            self._compute(span)
        for span in spans:
            if span.is_sampled:
                self._take(span.sequence, token)

    @precondition(lambda self: self.queue or self.running)
    @rule()
    def stop(self) -> None:
        """Nothing new comes; everyone gets to the end, the first to come not after all others."""
        bound = sum(each.lifetime_tokens for each in self.queue + self.running) + len(self.queue)
        first = self.queue[0] if self.queue else None
        num_steps_before = sum(each.lifetime_tokens for each in self.running)
        for number in range(bound + 1):
            if not (self.queue or self.running):
                break
            if number > num_steps_before:
                assert first not in self.queue, "starved"
            self.step(1)
        assert not self.scheduler.has_work and not self.queue and not self.running
        assert (self.pool.num_free, self.pool.num_promised) == (NUM_PAGES - 1, 0)

    @invariant()
    def the_scheduler_knows_whom_the_model_knows(self) -> None:
        assert list(self.scheduler.waiting.values()) == self.queue
        assert list(self.scheduler.running.values()) == self.running
        slots = [each.slot for each in self.running]
        assert len(set(slots)) == len(slots) <= self.slots and set(slots) <= set(range(self.slots))

    @invariant()
    def no_page_is_lost_and_all_promises_can_be_kept(self) -> None:
        held, promised = set(), 0
        for each in self.running:
            assert each.cache is not None
            held |= set(each.cache.pages)
            promised += -(-each.lifetime_tokens // PAGE_TOKENS) - len(each.cache.pages)
        assert PADDING_PAGE not in held
        assert (self.pool.num_unheld, self.pool.num_promised) == (NUM_PAGES - 1 - len(held), promised)
        assert 0 <= promised <= self.pool.num_unheld

    @invariant()
    def every_request_finds_its_own_tokens_in_its_pages(self) -> None:
        for each in self.running:
            assert each.cache is not None
            done = each.tokens[: self.computed[each.request.id]]
            for i, page in enumerate(each.cache.pages):
                mine = done[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
                assert self.content.get(page, [])[: len(mine)] == mine

    def _admit(self) -> None:
        """In arrival order; whoever is left in front of a free slot does not fit."""
        admitted: list[Sequence] = []
        self.scheduler.admit(admitted.append)
        assert admitted == self.queue[: len(admitted)]
        for each in admitted:
            assert each.cache is not None
            num_cached = each.cache.num_cached
            assert num_cached % PAGE_TOKENS == 0 and num_cached < len(each.request.prompt_tokens)
            self.computed[each.request.id] = num_cached
        self.queue, self.running = self.queue[len(admitted) :], self.running + admitted
        if self.queue and len(self.running) < self.slots:
            first = self.queue[0]
            hits = self.pool.find(first.reusable_names)
            held = {page for each in self.running if each.cache for page in each.cache.pages}
            needed = -(-first.lifetime_tokens // PAGE_TOKENS) - len(set(hits) & held)
            assert needed > self.pool.num_unheld - self.pool.num_promised
            assert self.running, "nobody holds a page, and still the first does not fit"

    def _check_plan(self, spans: list[Span]) -> None:
        rows = {span.sequence.request.id: span.num_rows for span in spans}
        assert len(rows) == len(spans), "one span a request"
        assert sum(rows.values()) <= self.max_rows
        assert bool(spans) == bool(self.running)
        remaining = {each.request.id: len(each.tokens) - self.computed[each.request.id] for each in self.running}
        assert sum(num for name, num in rows.items() if remaining[name] > 1) <= self.prefill
        assert all(rows.get(name) == 1 for name, num in remaining.items() if num == 1), "a decode row was left out"
        prompts = [name for name, num in remaining.items() if num > 1]
        whole = [rows.get(name, 0) == remaining[name] for name in prompts]
        assert whole == sorted(whole, reverse=True), "a later prompt took rows of an earlier one"

    def _compute(self, span: Span) -> None:
        sequence, cache = span.sequence, span.sequence.cache
        assert cache is not None and span.start == self.computed[sequence.request.id]
        for position in range(span.start, span.start + span.num_rows):
            page = self.content.setdefault(cache.pages[position // PAGE_TOKENS], [])
            del page[position % PAGE_TOKENS :]
            page.append(sequence.tokens[position])
        cache.commit(span.num_rows)
        self.computed[sequence.request.id] += span.num_rows

    def _take(self, sequence: Sequence, token: int) -> None:
        """What the engine does with a sampled token."""
        names = sequence.proven_names()
        if names is not None and sequence.cache is not None:
            sequence.cache.seal(names)
        sequence.tokens.append(token)
        if token == STOP or sequence.num_generated == sequence.request.max_tokens:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.scheduler.remove(sequence)  # a second time is nothing
        (self.running if sequence in self.running else self.queue).remove(sequence)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
