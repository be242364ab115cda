"""What one request holds of its rank's cache: one bundle over the line's cache groups, by all-or-nothing verbs.

A line declares groups of a few kinds; a kind is a `GroupShare`. The bundle reserves in all of them or in none, so that
no request ever holds half of what it needs. Today's lines have one Append group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pegahpc.engine.pages import PagePool


class GroupShare(Protocol):
    """One request's share of one cache group."""

    def reserve(self, lifetime_tokens: int, names: Sequence[bytes]) -> int | None:
        """Entitle the request to its whole life, reusing what is cached of `names`; the tokens so recovered, or None.

        On None nothing has changed.
        """
        ...

    def extend(self, num_tokens: int) -> None:
        """Make room for rows up to num_tokens in all; never fails within the lifetime."""
        ...

    def seal(self, names: Sequence[bytes]) -> None:
        """Everything under these names, from the sequence's start, is full and proven."""
        ...

    def drop(self) -> None:
        """Give all back; a second call is nothing."""
        ...


class AppendShare:
    """Pages of a group that grows with the sequence: drawn as rows come, sealed where they lie, shared by prefix."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.pages: list[int] = []
        self.num_sealed = 0  # leading pages whose content is proven finite and named
        self._num_promised = 0

    def reserve(self, lifetime_tokens: int, names: Sequence[bytes]) -> int | None:
        hits = self._pool.find(names)
        num_promised = self._pool.pages_for(lifetime_tokens) - len(hits)
        if not self._pool.promise(num_promised, hits):
            return None
        self.pages, self.num_sealed, self._num_promised = hits, len(hits), num_promised
        return len(hits) * self._pool.page_tokens

    def extend(self, num_tokens: int) -> None:
        missing = self._pool.pages_for(num_tokens) - len(self.pages)
        if missing > 0:
            assert missing <= self._num_promised, "a request outgrew its reservation"
            self.pages += self._pool.draw(missing)
            self._num_promised -= missing

    def seal(self, names: Sequence[bytes]) -> None:
        for page, name in zip(self.pages[self.num_sealed :], names[self.num_sealed :], strict=False):
            self._pool.seal(page, name)
        self.num_sealed = max(self.num_sealed, len(names))

    def drop(self) -> None:
        self._pool.give_back(self.pages)
        self._pool.take_back_promise(self._num_promised)
        self.pages, self.num_sealed, self._num_promised = [], 0, 0


class RequestCache:
    """One request's bundle."""

    def __init__(self, pool: PagePool) -> None:
        self._append = AppendShare(pool)
        self._shares: tuple[GroupShare, ...] = (self._append,)
        self.num_committed = 0  # tokens whose rows are in the cache
        self.num_cached = 0  # of those: tokens that the prefix cache gave at admission

    @property
    def pages(self) -> list[int]:
        """Pages of the Append groups, which share one table, in the sequence's order."""
        return self._append.pages

    @property
    def num_sealed(self) -> int:
        """Leading pages that are sealed."""
        return self._append.num_sealed

    @property
    def unproven_pages(self) -> list[int]:
        """Pages that only this request has written and no finite logits have vouched for."""
        return self._append.pages[self._append.num_sealed :]

    def reserve(self, lifetime_tokens: int, names: Sequence[bytes] = ()) -> bool:
        """Entitle the request to its whole life in every group, or False and nothing has changed.

        Args:
            names: pages of the prompt that may be reused, the first token after them excluded.
        """
        recovered: list[int] = []
        for share in self._shares:
            tokens = share.reserve(lifetime_tokens, names)
            if tokens is None:
                for done in self._shares[: len(recovered)]:
                    done.drop()
                return False
            recovered.append(tokens)
        self.num_committed = self.num_cached = min(recovered)
        return True

    def extend(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more rows; never fails within the lifetime."""
        for share in self._shares:
            share.extend(self.num_committed + num_tokens)

    def commit(self, num_tokens: int) -> None:
        """`num_tokens` more rows have been written and are history."""
        self.num_committed += num_tokens

    def seal(self, names: Sequence[bytes]) -> None:
        """Finite logits vouch for all committed rows: full pages may be reused under these names."""
        for share in self._shares:
            share.seal(names)

    def drop(self) -> None:
        """Give everything back; a second call is nothing."""
        for share in self._shares:
            share.drop()
