"""Which rank has which pages of the prefix cache, and how much of a prompt that spares each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pegahpc.wire.messages import KvEvents

NO_PAGE = b""  # the name of no page: behind a chain it ends every prefix


class PrefixIndex:
    """A set of page names for each rank, and for each name the ranks that have it.

    The second makes a look-up cost the prompt's pages, not pages times ranks: a system prompt that 64 ranks share is
    walked once.
    """

    def __init__(self, num_ranks: int) -> None:
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

    def forget(self, rank: int) -> None:
        """Nothing is known of this rank until its next snapshot."""
        for name in self._pages[rank] or ():
            self._drop(name, 1 << rank)
        self._pages[rank] = None

    def prefix_pages(self, names: Sequence[bytes]) -> dict[int, int]:
        """rank -> how many of a prompt's first pages it has, for each rank that has at least the first."""
        found: dict[int, int] = {}
        holders = -1  # all ranks hold the empty prefix
        for num_pages, name in enumerate((*names, NO_PAGE)):
            left = holders & self._holders.get(name, 0)
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
