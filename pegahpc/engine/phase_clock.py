"""Where a loop's time goes: seconds by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds spent in each phase since the start."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count what happens inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started
