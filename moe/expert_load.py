"""What the routed experts of one layer on this rank were asked to do since the start: it decides an MoE step's cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class ExpertLoad:
    """`rows_E`: rows that came to each local expert; `num_seen`: experts with rows, summed over steps."""

    def __init__(self, num_local_experts: int) -> None:
        self.rows_E = np.zeros(num_local_experts, np.int64)
        self.num_seen = 0

    def count(self, group_sizes: Sequence[int]) -> None:
        """One step's rows for each local expert."""
        sizes_E = np.asarray(group_sizes)
        self.rows_E += sizes_E
        self.num_seen += int(np.count_nonzero(sizes_E))
