"""Dispatch and combine: rows travel to the ranks of their experts and their outputs come home.

Experts are placed contiguously: expert e lives on rank e // (num_experts / world_size). The word of the chain
(protocols: "the chain word") rides in the header of a step's first exchange; `local` has nobody to tell.
"""

# Shape suffixes: T = live rows of this rank, K = experts a row, H = hidden, Q = (row, expert) pairs = T * K,
# R = rows received, each expert's group padded to a multiple of EXPERT_ALIGNMENT

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

EXPERT_ALIGNMENT = 2  # groups of even size: a product of one row has other bits than the same row among several
HAS_WORK, STOPPING = 1, 2


@dataclass(frozen=True)
class ChainView:
    """The fleet as the last exchange showed it."""

    has_work: bool  # some rank has work
    is_stopping: bool  # every rank wants to leave


@dataclass(frozen=True, kw_only=True)
class Received:
    """Rows that this rank's experts are to compute, grouped by local expert."""

    rows_RH: torch.Tensor
    group_sizes: list[int]  # rows of each local expert, padding included; their sum is R
    position_Q: torch.Tensor  # where the arrived pairs (in order of arrival) stand in rows_RH
    route: object = field(default=None)  # what the dispatcher needs to bring the outputs home


class Dispatcher(Protocol):
    """A transport of expert rows. One step makes the same list of exchanges on every rank, whatever its rows.

    An idle rank dispatches no rows and still takes part in every exchange.
    """

    first_expert: int
    num_local_experts: int

    def begin_step(self, word: int) -> None:
        """Hand over this rank's word (HAS_WORK | STOPPING) for the header of the next step's first exchange."""

    def chain_view(self) -> ChainView:
        """What the words of the step's first exchange said."""

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        """Send each live row to the ranks of its chosen experts."""

    def combine(self, out_RH: torch.Tensor, received: Received) -> torch.Tensor:
        """Bring the experts' outputs home: [num_live_rows, num_topk, hidden], in the order of topk_idx."""

    def close(self) -> None:
        """Leave the transport; the last thing a rank does."""


class LocalDispatcher:
    """All experts on this rank: dispatch is a permutation."""

    def __init__(self, num_experts: int) -> None:
        self.first_expert = 0
        self.num_local_experts = num_experts
        self._word = 0

    def begin_step(self, word: int) -> None:
        self._word = word

    def chain_view(self) -> ChainView:
        return ChainView(bool(self._word & HAS_WORK), bool(self._word & STOPPING))

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_topk = topk_idx_TK.shape[1]
        expert_Q, order_Q = topk_idx_TK.flatten().sort(stable=True)
        counts = expert_Q.bincount(minlength=self.num_local_experts)
        received = group_rows(
            lambda source_R: x_TH.index_select(0, order_Q.index_select(0, source_R) // num_topk),
            counts.unsqueeze(0),
        )
        return Received(
            rows_RH=received.rows_RH,
            group_sizes=received.group_sizes,
            position_Q=received.position_Q.new_empty(order_Q.shape).index_copy_(0, order_Q, received.position_Q),
            route=num_topk,
        )

    def combine(self, out_RH: torch.Tensor, received: Received) -> torch.Tensor:
        assert isinstance(received.route, int)
        return out_RH.index_select(0, received.position_Q).unflatten(0, (-1, received.route))

    def close(self) -> None:
        pass


def group_rows(take: Callable[[torch.Tensor], torch.Tensor], counts_SE: torch.Tensor) -> Received:
    """Regroup arrived pairs, sorted by (source rank, expert), into aligned groups by expert.

    Args:
        take: gives the rows of the arrived pairs with these indices.
        counts_SE: [num_sources, num_local_experts], int64: pairs of each source for each local expert.
    """
    counts_E = counts_SE.sum(0)
    aligned_E = (counts_E + EXPERT_ALIGNMENT - 1) // EXPERT_ALIGNMENT * EXPERT_ALIGNMENT
    group_sizes: list[int] = aligned_E.tolist()
    # A pair's place: its expert's start, plus that expert's pairs of earlier sources, plus its rank in its own run.
    start_SE = (aligned_E.cumsum(0) - aligned_E) + (counts_SE.cumsum(0) - counts_SE)
    runs = counts_SE.flatten()
    run_start = runs.cumsum(0) - runs
    num_pairs = int(runs.sum())
    position_Q = torch.arange(num_pairs) + (start_SE.flatten() - run_start).repeat_interleave(runs)
    source_R = torch.zeros(sum(group_sizes), dtype=torch.int64)  # padding repeats the first pair; nobody reads it
    source_R.index_copy_(0, position_Q, torch.arange(num_pairs))
    return Received(rows_RH=take(source_R), group_sizes=group_sizes, position_Q=position_Q)
