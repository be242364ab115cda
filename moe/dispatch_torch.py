"""The portable dispatcher: torch.distributed collectives (gloo), a fixed pair for dispatch and one for combine."""

# Shape suffixes: as in dispatch.py; W = ranks, E = local experts

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pegahpc.moe.dispatch import HAS_WORK, STOPPING, ChainView, Indices, Received, group_pairs, sort_pairs


@dataclass(frozen=True)
class _Route:
    """How the outputs travel home."""

    order_Q: torch.Tensor  # pairs in sending order -> index of (row, slot)
    sent: list[int]  # pairs to each rank
    arrived: list[int]  # pairs from each rank
    num_topk: int


class TorchDispatcher:
    """Three collectives a layer, the same list on every rank in every step: counts, rows, outputs.

    Every rank of the fleet calls `dispatch` and `combine` once a layer and step; an idle rank with zero rows.
    """

    def __init__(self, group: dist.ProcessGroup, *, num_experts: int) -> None:
        self._group = group
        self._rank, self._world_size = group.rank(), group.size()
        if num_experts % self._world_size:
            raise ValueError(f"{self._world_size} ranks do not divide {num_experts} experts")
        self.num_local_experts = num_experts // self._world_size
        self.first_expert = self._rank * self.num_local_experts
        self.num_exchanges = 0  # collectives so far; a test holds it to a constant a step
        self._word = 0
        self._words = [0] * self._world_size
        self._is_first = True

    @classmethod
    def connect(
        cls, store: Store, *, rank: int, world_size: int, num_experts: int, timeout_s: float
    ) -> TorchDispatcher:
        """Join the fleet's group through a store that all ranks share. The one place where the group is made.

        Raises:
            RuntimeError: not all ranks came within timeout_s.
        """
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        group = dist.group.WORLD
        assert group is not None
        return cls(group, num_experts=num_experts)

    def begin_step(self, word: int) -> None:
        self._word, self._is_first = word, True

    def chain_view(self) -> ChainView:
        return ChainView(any(word & HAS_WORK for word in self._words), all(word & STOPPING for word in self._words))

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_topk = topk_idx_TK.shape[1]
        order_Q, counts_E = sort_pairs(topk_idx_TK, self._world_size * self.num_local_experts)
        sent_WE = counts_E.reshape(self._world_size, -1)
        arrived_WE = self._exchange_counts(sent_WE)
        sent, arrived = sent_WE.sum(1).tolist(), arrived_WE.sum(1).tolist()
        rows_QH = self._exchange_rows(x_TH.index_select(0, torch.from_numpy(order_Q // num_topk)), sent, arrived)
        position_Q = torch.from_numpy(group_pairs(arrived_WE))
        return Received(
            rows_QH=torch.empty_like(rows_QH).index_copy_(0, position_Q, rows_QH),
            group_sizes=arrived_WE.sum(0).tolist(),
            position_Q=position_Q,
            route=_Route(torch.from_numpy(order_Q), sent, arrived, num_topk),
        )

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        route = received.route
        assert isinstance(route, _Route)
        arrived_QH = out_QH.index_select(0, received.position_Q)
        home_QH = self._exchange_rows(arrived_QH, route.arrived, route.sent)
        y_QH = torch.empty_like(home_QH).index_copy_(0, route.order_Q, home_QH)
        return torch.unflatten(y_QH, 0, (-1, route.num_topk))

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _exchange_counts(self, sent_WE: Indices) -> Indices:
        """[W, E] pairs to each rank's experts -> [W, E] pairs from each rank; column 0 carries the chain word."""
        header = np.empty((self._world_size, 1 + self.num_local_experts), dtype=np.int64)
        header[:, 0], header[:, 1:] = self._word, sent_WE
        answer = np.empty_like(header)
        dist.all_to_all_single(torch.from_numpy(answer), torch.from_numpy(header), group=self._group)
        self.num_exchanges += 1
        if self._is_first:
            self._words, self._is_first = answer[:, 0].tolist(), False
        return answer[:, 1:]

    def _exchange_rows(self, rows: torch.Tensor, sent: list[int], arrived: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(arrived), rows.shape[1])
        dist.all_to_all_single(out, rows, arrived, sent, group=self._group)
        self.num_exchanges += 1
        return out
