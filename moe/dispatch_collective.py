"""The portable dispatcher over collectives: counts, rows, outputs; gloo (torch) or MPI carries them."""

# Shape suffixes: as in dispatch.py; W = ranks, E = local experts

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from pegahpc.kernels.program import Exchanging
from pegahpc.moe.dispatch import ChainView, ChainWords, Indices, Received, Route, group_pairs, sort_pairs


class Collectives(Protocol):
    """What carries the exchanges. Every rank calls both in the same order; buffers only, nothing is pickled."""

    rank: int
    world_size: int
    waiting_for: str

    def exchange_counts(self, sent: Indices) -> Indices:
        """[W, n] int64, row r for rank r -> [W, n], row r from rank r."""
        ...

    def exchange_rows(self, rows: torch.Tensor, sent: list[int], arrived: list[int]) -> torch.Tensor:
        """sent[r] consecutive rows to each rank r -> arrived[r] rows from each rank r, in rank order."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class CollectiveDispatcher:
    """Three collectives a layer, the same list on every rank in every step: counts, rows, outputs.

    Every rank of the fleet calls `dispatch` and `combine` once a layer and step; an idle rank with zero rows.

    Raises:
        ValueError: the ranks do not divide the experts.
    """

    def __init__(self, collectives: Collectives, *, num_experts: int) -> None:
        self._collectives = collectives
        self._rank, self._world_size = collectives.rank, collectives.world_size
        if num_experts % self._world_size:
            raise ValueError(f"{self._world_size} ranks do not divide {num_experts} experts")
        self.num_local_experts = num_experts // self._world_size
        self.first_expert = self._rank * self.num_local_experts
        self.num_exchanges = 0  # collectives so far; a test holds it to a constant a step
        self.exchange_s = 0.0
        self._chain = ChainWords(self._world_size)

    @property
    def waiting_for(self) -> str:
        """ "peers" while a collective is under way: it does not say which."""
        return self._collectives.waiting_for

    def doorbells(self) -> list[int]:
        return []  # nothing wakes a rank that sleeps between steps

    @property
    def exchanges(self) -> Exchanging | None:
        return None

    def begin_step(self, word: int) -> None:
        self._chain.begin(word)

    def chain_view(self) -> ChainView:
        return self._chain.view()

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_topk = topk_idx_TK.shape[1]

        def on(indices: Indices) -> torch.Tensor:
            return torch.from_numpy(indices).to(x_TH.device)

        order_Q, counts_E = sort_pairs(topk_idx_TK, self._world_size * self.num_local_experts)
        sent_WE = counts_E.reshape(self._world_size, -1)
        arrived_WE = self._exchange_counts(sent_WE)
        sent, arrived = sent_WE.sum(1).tolist(), arrived_WE.sum(1).tolist()
        rows_QH = self._exchange_rows(x_TH.index_select(0, on(order_Q // num_topk)), sent, arrived)
        position_Q = on(group_pairs(arrived_WE))
        return Received(
            rows_QH=torch.empty_like(rows_QH).index_copy_(0, position_Q, rows_QH),
            group_sizes=arrived_WE.sum(0).tolist(),
            route=Route(position_Q, on(order_Q), sent, arrived, num_topk),
        )

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        route = received.route
        assert isinstance(route, Route)
        arrived_QH = out_QH.index_select(0, route.position_Q)
        home_QH = self._exchange_rows(arrived_QH, route.arrived, route.sent)
        y_QH = torch.empty_like(home_QH).index_copy_(0, route.order_Q, home_QH)
        return torch.unflatten(y_QH, 0, (-1, route.num_topk))

    def close(self) -> None:
        self._collectives.close()

    def _exchange_counts(self, sent_WE: Indices) -> Indices:
        """[W, E] pairs to each rank's experts -> [W, E] pairs from each rank; column 0 carries the chain word."""
        header = np.empty((self._world_size, 1 + self.num_local_experts), dtype=np.int64)
        header[:, 0], header[:, 1:] = self._chain.own, sent_WE
        started = time.perf_counter()
        answer = self._collectives.exchange_counts(header)
        self._exchanged(started)
        self._chain.hear(lambda: answer[:, 0].tolist())
        return answer[:, 1:]

    def _exchange_rows(self, rows: torch.Tensor, sent: list[int], arrived: list[int]) -> torch.Tensor:
        started = time.perf_counter()
        out = self._collectives.exchange_rows(rows.cpu().contiguous(), sent, arrived)  # gloo and MPI move host memory
        self._exchanged(started)
        return out.to(rows.device)

    def _exchanged(self, started: float) -> None:
        self.num_exchanges += 1
        self.exchange_s += time.perf_counter() - started
