"""Admission in arrival order by full lifetime, and what a step holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pegahpc.engine.pages import PagePool
from pegahpc.engine.scheduler import Scheduler
from pegahpc.engine.sequence import Sequence, Span
from pegahpc.wire.messages import Request

PAGE_TOKENS = 4


def scheduler_of(
    *, num_pages: int = 50, max_num_seqs: int = 4, max_rows_per_step: int = 16, max_prefill_rows: int = 10
) -> Scheduler:
    return Scheduler(PagePool(num_pages + 1, PAGE_TOKENS), max_num_seqs=max_num_seqs,
                     max_rows_per_step=max_rows_per_step, max_prefill_rows=max_prefill_rows)  # fmt: skip


def sequence(name: str, num_prompt: int, max_tokens: int = 4, client: bytes = b"c") -> Sequence:
    return Sequence(client, Request(id=name, prompt_tokens=list(range(num_prompt)), max_tokens=max_tokens), 0.0)


def admitted(scheduler: Scheduler) -> list[str]:
    names: list[str] = []
    scheduler.admit(lambda each: names.append(each.request.id))
    return names


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Plan, commit, and give each sampled sequence a token; (name, start, rows) of each span."""
    spans = scheduler.plan()
    for span in spans:
        assert span.sequence.cache is not None
        sampled = span.is_sampled
        span.sequence.cache.commit(span.num_rows)
        if sampled:
            span.sequence.tokens.append(7)
            if span.sequence.num_generated == span.sequence.request.max_tokens:
                scheduler.remove(span.sequence)
    return [(span.sequence.request.id, span.start, span.num_rows) for span in spans]


def test_requests_are_admitted_in_the_order_they_came() -> None:
    scheduler = scheduler_of(max_num_seqs=3)
    for name in "abcde":
        scheduler.add(sequence(name, 2))
    assert admitted(scheduler) == ["a", "b", "c"]
    assert [each.request.id for each in scheduler.waiting.values()] == ["d", "e"]
    assert admitted(scheduler) == []
    scheduler.remove(next(iter(scheduler.running.values())))
    assert admitted(scheduler) == ["d"]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = scheduler_of(num_pages=5)
    scheduler.add(sequence("a", 8, 4))  # 3 pages
    scheduler.add(sequence("large", 9, 3))  # 3 pages, 2 are left
    scheduler.add(sequence("small", 1, 1))  # 1 page
    assert admitted(scheduler) == ["a"]
    assert scheduler.pool.num_free == 2
    scheduler.remove(scheduler.running[b"c", "a"])
    assert admitted(scheduler) == ["large", "small"]


def test_the_whole_life_is_promised_at_admission_and_drawn_as_rows_come() -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence("a", 5, 12))
    scheduler.admit(lambda each: None)
    assert scheduler.pool.num_free == 50 - 5  # ceil(17 / 4)
    cache = scheduler.running[b"c", "a"].cache
    assert cache is not None and cache.pages == []
    step(scheduler)
    assert len(cache.pages) == 2 and scheduler.pool.num_free == 50 - 5


def test_a_prompt_is_cut_into_bounded_chunks_then_decodes() -> None:
    scheduler = scheduler_of(max_prefill_rows=10)
    scheduler.add(sequence("a", 23, 3))
    scheduler.admit(lambda each: None)
    assert step(scheduler) == [("a", 0, 10)]
    assert step(scheduler) == [("a", 10, 10)]
    assert step(scheduler) == [("a", 20, 3)]
    assert step(scheduler) == [("a", 23, 1)]
    assert step(scheduler) == [("a", 24, 1)]
    assert step(scheduler) == [] and not scheduler.has_work


def test_decode_rows_come_before_the_budget_of_prefill() -> None:
    scheduler = scheduler_of(max_num_seqs=4, max_rows_per_step=6, max_prefill_rows=6)
    for name in "abc":
        scheduler.add(sequence(name, 1, 5))
    scheduler.admit(lambda each: None)
    assert step(scheduler) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]
    scheduler.add(sequence("long", 20, 1))
    scheduler.admit(lambda each: None)
    assert step(scheduler) == [("long", 0, 3), ("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]


def test_two_prompts_share_the_budget_in_order() -> None:
    scheduler = scheduler_of(max_prefill_rows=10)
    for name, size in (("a", 7), ("b", 9), ("c", 5)):
        scheduler.add(sequence(name, size, 1))
    scheduler.admit(lambda each: None)
    assert step(scheduler) == [("a", 0, 7), ("b", 0, 3)]
    assert step(scheduler) == [("b", 3, 6), ("c", 0, 4)]
    assert step(scheduler) == [("c", 4, 1)]


def test_a_span_is_sampled_when_it_reaches_the_last_known_token() -> None:
    each = sequence("a", 5)
    assert not Span(each, 0, 4).is_sampled
    assert Span(each, 0, 5).is_sampled and Span(each, 4, 1).is_sampled


def test_no_requests_plan_nothing() -> None:
    scheduler = scheduler_of()
    assert admitted(scheduler) == [] and scheduler.plan() == [] and not scheduler.has_work


def test_a_waiting_request_is_removed_without_touching_pages_or_slots() -> None:
    scheduler = scheduler_of(max_num_seqs=1)
    first, second = sequence("a", 2), sequence("b", 2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit(lambda each: None)
    free = scheduler.pool.num_free
    scheduler.remove(second)
    scheduler.remove(second)
    assert scheduler.pool.num_free == free and scheduler.find((b"c", "b")) is None
    scheduler.remove(first)
    scheduler.remove(first)
    assert scheduler.pool.num_free == 50 and not scheduler.has_work
    scheduler.add(sequence("x", 2))
    scheduler.add(sequence("y", 2))
    assert admitted(scheduler) == ["x"], "one slot, given back once"


def test_clients_may_use_the_same_id() -> None:
    scheduler = scheduler_of()
    ours, theirs = sequence("a", 2, client=b"1"), sequence("a", 2, client=b"2")
    scheduler.add(ours)
    scheduler.add(theirs)
    scheduler.admit(lambda each: None)
    scheduler.remove(ours)
    assert scheduler.find((b"2", "a")) is theirs and scheduler.find((b"1", "a")) is None


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 7),
)
@settings(max_examples=80, deadline=None)
def test_every_request_is_computed_once_within_every_bound(
    sizes: list[tuple[int, int]], max_num_seqs: int, max_prefill_rows: int, more_rows: int
) -> None:
    max_rows = max_num_seqs + more_rows
    scheduler = scheduler_of(num_pages=12, max_num_seqs=max_num_seqs, max_rows_per_step=max_rows,
                             max_prefill_rows=max_prefill_rows)  # fmt: skip
    for number, (num_prompt, max_tokens) in enumerate(sizes):
        scheduler.add(sequence(str(number), num_prompt, max_tokens))
    order: list[str] = []
    done = dict.fromkeys(map(str, range(len(sizes))), 0)
    while scheduler.has_work:
        order += admitted(scheduler)
        slots = [each.slot for each in scheduler.running.values()]
        assert len(set(slots)) == len(slots) <= max_num_seqs and all(0 <= slot < max_num_seqs for slot in slots)
        deciding = {each.request.id for each in scheduler.running.values() if each.num_remaining == 1}
        spans = step(scheduler)
        assert spans, "requests that run and no step for them"
        assert sum(rows for _, _, rows in spans) <= max_rows
        assert sum(rows for name, _, rows in spans if name not in deciding) <= max_prefill_rows
        assert deciding <= {name for name, _, _ in spans}, "a decode row was left out"
        lengths = [rows for _, _, rows in spans]
        assert lengths == sorted(lengths, key=lambda rows: rows == 1), "single rows stand last"
        for name, start, rows in spans:
            assert start == done[name]
            done[name] += rows
    assert order == [str(number) for number in range(len(sizes))]
    assert done == {str(n): num_prompt + max_tokens - 1 for n, (num_prompt, max_tokens) in enumerate(sizes)}
    assert scheduler.pool.num_free == 12
