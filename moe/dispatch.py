"""Dispatch and combine: rows travel to the ranks of their experts and their outputs come home.

Experts are placed contiguously: expert e lives on rank e // (num_experts / world_size). The word of the chain
(protocols: "the chain word") rides in the header of a step's first exchange; `local` has nobody to tell.
"""

# Shape suffixes: T = live rows of this rank, K = experts a row, H = hidden, Q = (row, expert) pairs = T * K,
# the same pairs where their experts are

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pegahpc.kernels.program import Exchanging

HAS_WORK, STOPPING = 1, 2

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ChainView:
    """The fleet as the last exchange showed it."""

    has_work: bool  # some rank has work
    is_stopping: bool  # every rank wants to leave


class ChainWords:
    """The words of one step: this rank's, and all ranks' as the step's first exchange brought them."""

    def __init__(self, world_size: int) -> None:
        self.own = 0
        self._all = [0] * world_size
        self._is_first = True

    def begin(self, word: int) -> None:
        """A step begins."""
        self.own, self._is_first = word, True

    def hear(self, words: Callable[[], list[int]]) -> None:
        """An exchange is complete; of the step's first one the words are read."""
        if self._is_first:
            self._all, self._is_first = words(), False

    def view(self) -> ChainView:
        """What they say together."""
        return ChainView(any(word & HAS_WORK for word in self._all), all(word & STOPPING for word in self._all))


@dataclass(frozen=True, kw_only=True)
class Received:
    """Rows that this rank's experts are to compute, grouped by local expert."""

    rows_QH: torch.Tensor
    group_sizes: list[int]  # rows of each local expert; their sum is that of rows_QH
    route: object  # the dispatcher's own: what it needs to bring the outputs home


@dataclass(frozen=True)
class Route:
    """How the outputs of one dispatch travel home, between ranks."""

    position_Q: torch.Tensor  # where each arrived pair stands among the rows
    order_Q: torch.Tensor  # pairs in sending order -> index of (row, slot)
    sent: list[int]  # pairs to each rank
    arrived: list[int]  # pairs from each rank
    num_topk: int


class Dispatcher(Protocol):
    """A transport of expert rows. One step makes the same list of exchanges on every rank, whatever its rows.

    An idle rank dispatches no rows and still takes part in every exchange.
    """

    first_expert: int
    num_local_experts: int

    @property
    def num_exchanges(self) -> int:
        """So far; grows by a constant a step."""
        ...

    @property
    def exchange_s(self) -> float:
        """Seconds spent in exchanges so far, waiting for peers included."""
        ...

    @property
    def waiting_for(self) -> str:
        """Whom an exchange under way waits for: "rank 2", "peers" where the transport does not say, "" for nobody."""
        ...

    def doorbells(self) -> list[int]:
        """Descriptors, maybe none, that become readable when a peer begins the next step, also if it has already."""
        ...

    @property
    def exchanges(self) -> Exchanging | None:
        """What C code needs to make the exchanges by itself; None where it cannot."""
        ...

    def begin_step(self, word: int) -> None:
        """Hand over this rank's word (HAS_WORK | STOPPING) for the header of the next step's first exchange."""

    def chain_view(self) -> ChainView:
        """What the words of the step's first exchange said."""
        ...

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        """Send each live row to the ranks of its chosen experts."""
        ...

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        """Bring the experts' outputs home: [num_live_rows, num_topk, hidden], in the order of topk_idx."""
        ...

    def close(self) -> None:
        """Leave the transport; the last thing a rank does."""


class LocalDispatcher:
    """All experts on this rank: dispatch is a permutation."""

    def __init__(self, num_experts: int) -> None:
        self.first_expert = 0
        self.num_local_experts = num_experts
        self.num_exchanges = 0
        self.exchange_s = 0.0
        self.exchanges: Exchanging | None = None  # set where a program may be recorded
        self.waiting_for = ""
        self._word = 0

    def doorbells(self) -> list[int]:
        return []

    def begin_step(self, word: int) -> None:
        self._word = word

    def chain_view(self) -> ChainView:
        return ChainView(bool(self._word & HAS_WORK), bool(self._word & STOPPING))

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_topk = topk_idx_TK.shape[1]
        order_Q, counts_E = sort_pairs(topk_idx_TK, self.num_local_experts)
        position_Q = np.empty_like(order_Q)
        position_Q[order_Q] = np.arange(len(order_Q))
        return Received(
            rows_QH=x_TH.index_select(0, torch.from_numpy(order_Q // num_topk).to(x_TH.device)),
            group_sizes=counts_E.tolist(),
            route=(torch.from_numpy(position_Q).to(x_TH.device), num_topk),
        )

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        assert isinstance(received.route, tuple)
        position_Q, num_topk = received.route
        return torch.unflatten(out_QH.index_select(0, position_Q), 0, (-1, num_topk))

    def close(self) -> None:
        pass


def sort_pairs(topk_idx_TK: torch.Tensor, num_experts: int) -> tuple[Indices, Indices]:
    """Pairs (row * num_topk + slot) in order of their expert, rows in order within one; and the pairs of each expert.

    On the host, in numpy: for the few hundred pairs of a step a torch call costs several times its work.
    """
    expert_Q = topk_idx_TK.reshape(-1).cpu().numpy()
    return expert_Q.argsort(kind="stable"), np.bincount(expert_Q, minlength=num_experts)


def group_pairs(counts_SE: Indices) -> Indices:
    """Places among groups by expert, of pairs that arrived sorted by (source rank, local expert).

    Args:
        counts_SE: [num_sources, num_local_experts], pairs of each source for each local expert.

    Returns:
        [num_pairs]: its expert's start, plus that expert's pairs of earlier sources, plus its place in its own run.
    """
    counts_E = counts_SE.sum(0)
    start_SE = (counts_E.cumsum() - counts_E) + (counts_SE.cumsum(0) - counts_SE)
    runs = counts_SE.reshape(-1)
    place_Q: Indices = np.arange(int(runs.sum())) + np.repeat(start_SE.reshape(-1) - (runs.cumsum() - runs), runs)
    return place_Q
