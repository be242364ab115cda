"""Pages that ranks are about to store: those of prompts that were sent and have no first token yet."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

# A prompt that waits for longer stands in a queue: that its rank once has its pages says little by then. It also ends
# what is awaited of a request whose end was missed.
BOUND_S = 60.0


class AwaitedPages:
    """For each request on its way: its rank, and the pages that this rank will store for it."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, tuple[float, int, Sequence[bytes]]] = {}  # id -> until, rank, names; oldest first
        self._num_requests: Counter[tuple[int, bytes]] = Counter()  # that await one page of one rank
        self._ranks: dict[bytes, int] = {}  # name -> a bit for each rank

    def ranks_of(self, name: bytes) -> int:
        """A bit for each rank that is about to store this page."""
        return self._ranks.get(name, 0)

    def add(self, request_id: str, rank: int, names: Sequence[bytes]) -> None:
        """A request with these pages goes to this rank."""
        self._requests[request_id] = (self._clock() + BOUND_S, rank, names)
        for name in names:
            self._num_requests[rank, name] += 1
            self._ranks[name] = self._ranks.get(name, 0) | 1 << rank

    def drop(self, request_id: str) -> None:
        """A request's pages are stored, or will not be. One that is not known is no error."""
        if (known := self._requests.pop(request_id, None)) is None:
            return
        _, rank, names = known
        for name in names:
            self._num_requests[rank, name] -= 1
            if not self._num_requests[rank, name]:
                del self._num_requests[rank, name]
                self._forget(rank, name)

    def drop_old(self) -> None:
        """Drop what was awaited for too long."""
        now_s = self._clock()
        while self._requests:
            request_id, (until_s, _, _) = next(iter(self._requests.items()))
            if until_s > now_s:
                return
            self.drop(request_id)

    def _forget(self, rank: int, name: bytes) -> None:
        if left := self._ranks[name] & ~(1 << rank):
            self._ranks[name] = left
        else:
            del self._ranks[name]
