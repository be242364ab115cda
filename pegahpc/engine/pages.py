"""The page pool of one rank: pages are free, held by requests, or kept for the prefix cache until they are needed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

PADDING_PAGE = 0  # padding rows read and write here; never handed out


class PagePool:
    """Pages by number, and by name once their content is sealed.

    A sealed page that nobody holds is kept: a later request with the same prefix may hold it again. Pages are given
    away free ones first, then kept ones, least recently released first. What running requests have been promised is
    never given to others: a promise is drawn without fail.

    Args:
        num_pages: pages of the slab, the padding page included.
        page_tokens: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages has none to give; page 0 is the padding page")
        self.page_tokens = page_tokens
        self.total_pages = num_pages - 1
        self.num_promised = 0  # pages that running requests may still draw
        self._free = deque(range(1, num_pages))
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    @property
    def num_unheld(self) -> int:
        """Pages that nobody holds: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_free(self) -> int:
        """Pages that can be promised to a new request."""
        return self.num_unheld - self.num_promised

    @property
    def names(self) -> list[bytes]:
        """Names of all pages that can be hit."""
        return list(self._page_of)

    def pages_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / page_tokens)."""
        return -(-num_tokens // self.page_tokens)

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix of these names that is known."""
        pages: list[int] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def promise(self, num_pages: int, hits: Sequence[int] = ()) -> bool:
        """Hold `hits` and promise `num_pages` more, or nothing of both."""
        num_kept_hits = sum(not self._holders[page] for page in hits)
        if num_pages > self.num_free - num_kept_hits:
            return False
        for page in hits:
            self._holders[page] += 1
            self._kept.pop(page, None)
        self.num_promised += num_pages
        return True

    def draw(self, num_pages: int) -> list[int]:
        """Hold that many pages of what was promised; cannot fail."""
        assert num_pages <= self.num_promised <= self.num_unheld, "more was promised than there is"
        self.num_promised -= num_pages
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def take_back_promise(self, num_pages: int) -> None:
        """A request will not draw the rest of what it was promised."""
        assert num_pages <= self.num_promised
        self.num_promised -= num_pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Hold these pages no more. Given in a sequence's order, its last page is the first to be evicted."""
        for page in reversed(pages):
            assert self._holders[page] > 0, "a page was given back twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._name_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def seal(self, page: int, name: bytes) -> None:
        """A held page is full and will not change. Of two pages with one content the first keeps the name."""
        assert self._holders[page] > 0
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name], self._name_of[page] = page, name
            self._stored.append(name)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) names since the last call; a name is in one of them at most."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        both = set(stored) & set(removed)  # stored and evicted in between; the last word is what stands
        now = self._page_of
        return (
            [name for name in dict.fromkeys(stored) if name not in both or name in now],
            [name for name in dict.fromkeys(removed) if name not in both or name not in now],
        )

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        name = self._name_of.pop(page)
        del self._page_of[name]
        self._removed.append(name)
        return page
