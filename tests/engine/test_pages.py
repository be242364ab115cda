"""The page pool: no page twice, never the padding page, all or nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pegahpc.engine.pages import PADDING_PAGE, PagePool, RequestCache

NUM_PAGES, PAGE_TOKENS = 9, 4


class Pool(RuleBasedStateMachine):
    """Requests come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.caches: list[RequestCache] = []

    def free(self) -> int:
        return NUM_PAGES - 1 - sum(len(cache.pages) for cache in self.caches)

    @rule(num_tokens=st.integers(0, 40))
    def reserve(self, num_tokens: int) -> None:
        cache, before = RequestCache(self.pool), self.free()
        needed = len(range(0, num_tokens, PAGE_TOKENS))
        assert cache.reserve(num_tokens) == (needed <= before)
        assert len(cache.pages) == (needed if needed <= before else 0)
        self.caches.append(cache)

    @rule(which=st.integers(0, 100))
    def drop(self, which: int) -> None:
        if self.caches:
            cache = self.caches.pop(which % len(self.caches))
            cache.drop()
            cache.drop()
            assert cache.pages == []

    @invariant()
    def nobody_shares_a_page_and_none_is_lost(self) -> None:
        held = [page for cache in self.caches for page in cache.pages]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(1, NUM_PAGES)) - {PADDING_PAGE}
        assert self.pool.num_free == self.free()
        assert self.pool.total_pages == NUM_PAGES - 1


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, deadline=None)


def test_every_page_but_the_padding_page_is_handed_out_once() -> None:
    pool = PagePool(5, 16)
    assert pool.take(5) is None
    pages = pool.take(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]
    assert pool.take(1) is None and pool.take(0) == []
    pool.give_back(pages)
    assert pool.num_free == 4


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_pages_round_up(num_tokens: int, pages: int) -> None:
    assert PagePool(99, 16).pages_for(num_tokens) == pages


def test_a_pool_without_a_page_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 1 pages has none to give"):
        PagePool(1, 16)


def test_what_is_given_back_twice_and_what_outgrows_its_pages_is_found() -> None:
    pool = PagePool(5, 16)
    pages = pool.take(2)
    assert pages is not None
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(pages)
    cache = RequestCache(PagePool(5, 16))
    assert cache.reserve(17)
    cache.commit(32)
    with pytest.raises(AssertionError, match="outgrew"):
        cache.commit(1)
