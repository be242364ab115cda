"""What the routed experts of one layer on this rank were asked to do since the start: it decides an MoE step's cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class ExpertLoad:
    """Counts of one layer, in memory that C code counts into too."""

    def __init__(self, num_local_experts: int) -> None:
        self.counts = np.zeros(num_local_experts + 1, np.int64)

    @property
    def rows(self) -> list[int]:
        """That came to each local expert."""
        rows: list[int] = self.counts[:-1].tolist()
        return rows

    @property
    def num_seen(self) -> int:
        """Experts with rows, summed over steps."""
        return int(self.counts[-1])

    def count(self, group_sizes: Sequence[int]) -> None:
        """One step's rows for each local expert."""
        self.counts[:-1] += group_sizes
        self.counts[-1] += sum(size > 0 for size in group_sizes)
