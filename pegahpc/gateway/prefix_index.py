"""Which rank has, or is about to have, which pages of the prefix cache, and how much of a prompt that spares it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from pegahpc.gateway.awaited_pages import AwaitedPages
from pegahpc.wire.messages import KvEvents

NO_PAGE = b""  # the name of no page: behind a chain it ends every prefix


class PrefixIndex:
    """A set of page names for each rank, and for each name the ranks that have it.

    The second makes a look-up cost the prompt's pages, not pages times ranks: a system prompt that 64 ranks share is
    walked once.
    """

    def __init__(self, num_ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._awaited = AwaitedPages(clock=clock)
        self._pages: list[set[bytes] | None] = [None] * num_ranks  # None: no snapshot since the last connection
        self._holders: dict[bytes, int] = {}  # name -> a bit for each rank

    def num_pages(self, rank: int) -> int:
        """Names known of one rank."""
        return len(self._pages[rank] or ())

    def apply(self, rank: int, events: KvEvents) -> None:
        """Take one message's changes: what is stored first, then what is removed.

        Changes before the first snapshot are dropped: they belong to a connection that is no more.
        """
        if events.is_snapshot:
            self.forget(rank)
            self._pages[rank] = set()
        pages = self._pages[rank]
        if pages is None:
            return
        bit = 1 << rank
        for name in events.stored:
            pages.add(name)
            self._holders[name] = self._holders.get(name, 0) | bit
        for name in events.removed:
            if name in pages:
                pages.remove(name)
                self._drop(name, bit)

    def await_pages(self, request_id: str, rank: int, names: Sequence[bytes]) -> None:
        """A request with these pages goes to a rank, which counts as having them until `settle`, or for a while."""
        pages = self._pages[rank] or ()
        num_held = next((idx for idx, name in enumerate(names) if name not in pages), len(names))
        self._awaited.add(request_id, rank, names[num_held:])

    def settle(self, request_id: str) -> None:
        """The rank has said what it stored of a request, or the request is over; what it has not stored it has not."""
        self._awaited.drop(request_id)

    def forget(self, rank: int) -> None:
        """Nothing is known of this rank until its next snapshot."""
        for name in self._pages[rank] or ():
            self._drop(name, 1 << rank)
        self._pages[rank] = None

    def prefix_pages(self, names: Sequence[bytes]) -> dict[int, int]:
        """rank -> how many of a prompt's first pages it has or awaits, for each rank with at least the first."""
        self._awaited.drop_old()
        found: dict[int, int] = {}
        holders = -1  # all ranks hold the empty prefix
        for num_pages, name in enumerate((*names, NO_PAGE)):
            left = holders & (self._holders.get(name, 0) | self._awaited.ranks_of(name))
            if num_pages and left != holders:
                found.update(dict.fromkeys(_ranks_of(holders ^ left), num_pages))
            if not left:
                break
            holders = left
        return found

    def _drop(self, name: bytes, bit: int) -> None:
        if left := self._holders[name] & ~bit:
            self._holders[name] = left
        else:
            del self._holders[name]


def _ranks_of(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
