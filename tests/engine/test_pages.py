"""The page pool and a request's share of it, against a plain model: nothing twice, nothing lost, promises kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pegahpc.engine.pages import PADDING_PAGE, PagePool
from pegahpc.engine.request_cache import RequestCache
from pegahpc.page_names import page_names, root_name

NUM_PAGES, PAGE_TOKENS = 9, 4
ROOT = root_name(b"salt")


class Request:
    """What the model knows of one request: its tokens, and how far it is."""

    def __init__(self, cache: RequestCache, tokens: list[int]) -> None:
        self.cache, self.tokens = cache, tokens
        self.names = page_names(tokens, PAGE_TOKENS, ROOT)


class Pool(RuleBasedStateMachine):
    """Requests with few different prefixes come, grow, and go in any order. Content: what the pages hold, by model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.running: list[Request] = []
        self.content: dict[int, list[int]] = {}
        self.known: set[bytes] = set()

    @rule(start=st.sampled_from([0, 1]), length=st.integers(1, 14), more=st.integers(0, 8))
    def reserve(self, start: int, length: int, more: int) -> None:
        tokens = [start] * length + [9] * more
        cache, before = RequestCache(self.pool), (self.pool.num_free, self.pool.num_unheld, self.pool.names)
        reusable = page_names(tokens[:length], PAGE_TOKENS, ROOT)[: (length - 1) // PAGE_TOKENS]
        if cache.reserve(len(tokens), reusable):
            assert cache.num_cached % PAGE_TOKENS == 0 and cache.num_cached < length
            for i, page in enumerate(cache.pages):
                assert self.content[page] == tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
            self.running.append(Request(cache, tokens))
        else:
            assert before == (self.pool.num_free, self.pool.num_unheld, self.pool.names) and cache.pages == []
            assert self.pool.pages_for(len(tokens)) > before[0] - len(self.pool.find(reusable))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), rows=st.integers(1, 6), is_sampled=st.booleans())
    def step(self, which: int, rows: int, is_sampled: bool) -> None:
        request = self.running[which % len(self.running)]
        cache = request.cache
        rows = min(rows, len(request.tokens) - cache.num_committed)
        if not rows:
            return
        cache.extend(rows)
        for position in range(cache.num_committed, cache.num_committed + rows):
            page = cache.pages[position // PAGE_TOKENS]
            held = self.content.setdefault(page, [])
            del held[position % PAGE_TOKENS :]
            held.append(request.tokens[position])
        cache.commit(rows)
        if is_sampled:
            cache.seal(request.names[: cache.num_committed // PAGE_TOKENS])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def drop(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        request.cache.drop()
        request.cache.drop()
        assert request.cache.pages == []

    @invariant()
    def no_page_is_lost_or_shared_by_different_content(self) -> None:
        held = {page for request in self.running for page in request.cache.pages}
        assert held <= set(range(1, NUM_PAGES)) - {PADDING_PAGE}
        assert self.pool.num_unheld == NUM_PAGES - 1 - len(held)
        assert 0 <= self.pool.num_promised <= self.pool.num_unheld
        for request in self.running:
            for i, page in enumerate(request.cache.pages):
                written = request.tokens[: request.cache.num_committed][i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
                assert self.content.get(page, [])[: len(written)] == written

    @invariant()
    def events_tell_what_can_be_hit(self) -> None:
        stored, removed = self.pool.take_events()
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(self.pool.names)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, deadline=None)


def new_cache(pool: PagePool, tokens: list[int], *, more: int = 0) -> RequestCache:
    """A request that has computed and proven all its tokens."""
    cache = RequestCache(pool)
    names = page_names(tokens, PAGE_TOKENS, ROOT)
    assert cache.reserve(len(tokens) + more, names[: (len(tokens) - 1) // PAGE_TOKENS])
    cache.extend(len(tokens) - cache.num_committed)
    cache.commit(len(tokens) - cache.num_committed)
    cache.seal(names)
    return cache


def test_a_second_request_holds_the_first_ones_full_pages_and_computes_at_least_one_token() -> None:
    pool = PagePool(20, PAGE_TOKENS)
    first = new_cache(pool, [1] * 8 + [2])
    second = new_cache(pool, [1] * 8 + [3])
    assert second.num_cached == 8 and second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    whole = new_cache(pool, [1] * 8)  # both pages are known, but the last token has to be computed
    assert whole.num_cached == 4


def test_released_pages_are_hit_until_they_are_needed_and_the_end_of_a_chain_goes_first() -> None:
    pool = PagePool(4, PAGE_TOKENS)
    cache = new_cache(pool, [1] * 12)
    first, second, third = cache.pages
    cache.drop()
    assert pool.num_free == 3 and pool.find(page_names([1] * 12, PAGE_TOKENS, ROOT)) == [first, second, third]
    other = RequestCache(pool)
    assert other.reserve(4)
    other.extend(4)
    assert other.pages == [third]
    assert pool.find(page_names([1] * 12, PAGE_TOKENS, ROOT)) == [first, second]


def test_the_least_recently_released_chain_is_evicted_first() -> None:
    pool = PagePool(4, PAGE_TOKENS)
    for token in (1, 2, 3):
        new_cache(pool, [token] * 4).drop()
    new_cache(
        pool, [1] * 4 + [1]
    ).drop()  # touches the oldest: 2 is the oldest now, and gave its page to the fifth token
    assert [bool(pool.find(page_names([token] * 4, PAGE_TOKENS, ROOT))) for token in (1, 2, 3)] == [True, False, True]


def test_what_is_promised_to_one_is_not_given_to_another() -> None:
    pool = PagePool(6, PAGE_TOKENS)
    first, second = RequestCache(pool), RequestCache(pool)
    assert first.reserve(16) and pool.num_free == 1 and pool.num_unheld == 5
    assert not second.reserve(8) and second.reserve(4)
    first.extend(16)
    second.extend(4)
    assert sorted(first.pages + second.pages) == [1, 2, 3, 4, 5]
    first.drop()
    second.drop()
    assert (pool.num_free, pool.num_promised) == (5, 0)


def test_a_hit_on_a_kept_page_costs_one_of_the_free_ones() -> None:
    pool = PagePool(4, PAGE_TOKENS)
    new_cache(pool, [1] * 8).drop()  # two kept, one free
    cache = RequestCache(pool)
    names = page_names([1] * 8, PAGE_TOKENS, ROOT)
    assert not cache.reserve(16, names) and pool.num_free == 3  # two hits and two more of one
    assert cache.reserve(12, names) and cache.num_cached == 8 and pool.num_free == 0


def test_pages_without_proof_are_not_found_and_are_named_for_cleaning() -> None:
    pool = PagePool(9, PAGE_TOKENS)
    cache = RequestCache(pool)
    names = page_names([1] * 9, PAGE_TOKENS, ROOT)
    assert cache.reserve(9, [])
    cache.extend(9)
    cache.commit(9)
    assert pool.find(names) == [] and cache.unproven_pages == cache.pages
    cache.seal(names[:1])
    assert pool.find(names) == cache.pages[:1] and cache.unproven_pages == cache.pages[1:]


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_pages_round_up(num_tokens: int, pages: int) -> None:
    assert PagePool(99, 16).pages_for(num_tokens) == pages


def test_a_pool_without_a_page_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 1 pages has none to give"):
        PagePool(1, 16)


def test_what_is_given_back_twice_and_what_outgrows_its_pages_is_found() -> None:
    pool = PagePool(5, 16)
    assert pool.promise(2)
    pages = pool.draw(2)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(pages)
    cache = RequestCache(PagePool(5, 16))
    assert cache.reserve(17)
    cache.extend(32)
    cache.commit(32)
    with pytest.raises(AssertionError, match="outgrew"):
        cache.extend(1)


def test_names_are_the_chain_that_the_protocol_says() -> None:
    from hashlib import blake2b

    h0 = blake2b(b"salt", digest_size=16).digest()
    h1 = blake2b(h0 + bytes([1, 0, 0, 0, 2, 0, 0, 0]), digest_size=16).digest()
    h2 = blake2b(h1 + bytes([3, 1, 0, 0, 4, 0, 0, 0]), digest_size=16).digest()
    assert page_names([1, 2, 259, 4, 5], 2, root_name(b"salt")) == [h1, h2]
    assert page_names([1], 2, root_name(b"salt")) == []
