"""The page pool of one rank and the share of it that each request holds."""

from __future__ import annotations

from collections import deque

PADDING_PAGE = 0  # padding rows read and write here; never handed out


class PagePool:
    """Free pages, first in, first out.

    Args:
        num_pages: pages of the slab, the padding page included.
        page_tokens: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages has none to give; page 0 is the padding page")
        self.page_tokens = page_tokens
        self.total_pages = num_pages - 1
        self._free = deque(range(1, num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / page_tokens)."""
        return -(-num_tokens // self.page_tokens)

    def take(self, num_pages: int) -> list[int] | None:
        """All of `num_pages`, or None and nothing changes."""
        if num_pages > len(self._free):
            return None
        return [self._free.popleft() for _ in range(num_pages)]

    def give_back(self, pages: list[int]) -> None:
        """Return what `take` gave; each page once."""
        assert len(self._free) + len(pages) <= self.total_pages, "a page was given back twice"
        self._free.extend(pages)


class RequestCache:
    """One request's pages. Its whole life is reserved at admission, so that a later token never lacks a page."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []
        self.num_committed = 0  # tokens whose rows are in the cache

    def reserve(self, lifetime_tokens: int) -> bool:
        """Take every page that `lifetime_tokens` can need; False, and nothing taken, when they are not there now."""
        pages = self._pool.take(self._pool.pages_for(lifetime_tokens))
        if pages is None:
            return False
        self.pages = pages
        return True

    def commit(self, num_tokens: int) -> None:
        """`num_tokens` more rows have been written and are history."""
        self.num_committed += num_tokens
        assert self.num_committed <= len(self.pages) * self._pool.page_tokens, "a request outgrew its reservation"

    def drop(self) -> None:
        """Give all pages back; a second call is nothing."""
        self._pool.give_back(self.pages)
        self.pages = []
