"""How many requests the gateway works on, whether it takes new ones, and when the last has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from pegahpc.gateway.errors import ApiError, draining, fleet_ended, refused_field


class Gate:
    """Every generation passes it, and holds its place until its response is out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.is_draining = False
        self.has_ended = False  # the fleet has failed; nobody is left to ask

    @contextlib.contextmanager
    def enter(self, num_places: int = 1) -> Iterator[None]:
        """Places for the time of the block, one for each sequence that is made.

        Raises:
            ApiError: 503 while draining and after the fleet's end, 429 when too few places are free, 400 when there
                are not as many.
        """
        if self.has_ended:
            raise fleet_ended()
        if self.is_draining:
            raise draining()
        if num_places > self._limit:
            many = f"{num_places} choices are more than the {self._limit} places (gateway.max_concurrent_requests)"
            raise refused_field(None, many)
        if self._num_inside + num_places > self._limit:
            message = (
                f"{self._num_inside} of {self._limit} places (gateway.max_concurrent_requests) are taken; try again."
            )
            raise ApiError(429, message, code="too_many_requests")
        self._num_inside += num_places
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= num_places
            if not self._num_inside:
                self._is_empty.set()

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """True when nobody is inside; False when that took longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
