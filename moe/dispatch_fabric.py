"""The house's own dispatcher: one-sided puts of actual rows into peers' slabs, and doorbells."""

# Shape suffixes: as in dispatch.py; W = ranks, E = local experts

from __future__ import annotations

import time

import numpy as np
import torch

from pegahpc.moe.dispatch import (
    ChainView,
    ChainWords,
    Indices,
    Received,
    Route,
    group_pairs,
    sort_pairs,
)
from pegahpc.moe.fabric import FabricPort, Peer, fetch, has_rung, map_windows, ring, wait_for_ring


class DispatchTimeout(RuntimeError):
    """A peer did not come to an exchange; the fleet ends."""


class FabricDispatcher:
    """Two exchanges a layer, the same list on every rank in every step: rows with their counts, then outputs.

    Every rank rings every peer in each exchange, with or without rows. A window is written again only after its owner
    has read it: a rank puts the next layer's rows when all outputs have come home, which a peer sends after reading
    this layer's rows; and it puts outputs when all rows have arrived, which a peer sends after it read the last ones.
    """

    def __init__(self, port: FabricPort, peers: dict[int, Peer], *, timeout_s: float) -> None:
        shape = port.shape
        self.num_local_experts = shape.num_local_experts
        self.first_expert = port.rank * shape.num_local_experts
        self.num_exchanges = 0
        self.exchange_s = 0.0
        self.waiting_for = ""  # whom this rank waits for now
        self._shape, self._rank, self._timeout_s = shape, port.rank, timeout_s
        self._bells, self._own = port.bells, map_windows(port.slab_fd, shape)
        self.doorbells = [port.bells[rank] for rank in range(shape.world_size) if rank != port.rank]
        # From the next rank round, so that not all ranks put to rank 0 first.
        self._peers = {rank: peers[rank] for i in range(1, shape.world_size)
                       if (rank := (port.rank + i) % shape.world_size) in peers}  # fmt: skip
        self._chain = ChainWords(shape.world_size)

    @classmethod
    def connect(cls, port: FabricPort, addresses: list[str], *, timeout_s: float) -> FabricDispatcher:
        """Fetch every peer's slab and doorbell; every rank of the fleet calls this at once.

        Args:
            addresses: `FabricPort.address` of each rank, in rank order.

        Raises:
            TimeoutError: a peer did not answer within timeout_s.
        """
        peers = {
            rank: fetch(address, own_rank=port.rank, shape=port.shape, timeout_s=timeout_s)
            for rank, address in enumerate(addresses)
            if rank != port.rank
        }
        return cls(port, peers, timeout_s=timeout_s)

    def begin_step(self, word: int) -> None:
        self._chain.begin(word)

    def chain_view(self) -> ChainView:
        return self._chain.view()

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_topk = topk_idx_TK.shape[1]
        assert topk_idx_TK.numel() <= self._shape.max_pairs, "more rows than engine.max_rows_per_step"
        order_Q, counts_E = sort_pairs(topk_idx_TK, self._shape.world_size * self.num_local_experts)
        sent_WE = counts_E.reshape(self._shape.world_size, -1)
        sent: list[int] = sent_WE.sum(1).tolist()
        parts = torch.split(x_TH.index_select(0, torch.from_numpy(order_Q // num_topk)), sent)
        for rank, peer in self._peers.items():
            window = peer.windows[self._rank]
            window.header[0], window.header[1:] = self._chain.own, sent_WE[rank]
            window.rows[: sent[rank]] = parts[rank]
            ring(peer.bell_fd)
        self._await_all()
        arrived_WE = self._arrived_counts(sent_WE)
        arrived: list[int] = arrived_WE.sum(1).tolist()
        rows_QH = torch.cat([parts[rank] if rank == self._rank else self._own[rank].rows[:count]
                             for rank, count in enumerate(arrived)])  # fmt: skip
        position_Q = torch.from_numpy(group_pairs(arrived_WE))
        return Received(
            rows_QH=torch.empty_like(rows_QH).index_copy_(0, position_Q, rows_QH),
            group_sizes=arrived_WE.sum(0).tolist(),
            route=Route(position_Q, torch.from_numpy(order_Q), sent, arrived, num_topk),
        )

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        route = received.route
        assert isinstance(route, Route)
        parts = torch.split(out_QH.index_select(0, route.position_Q), route.arrived)
        for rank, peer in self._peers.items():
            peer.windows[self._rank].outputs[: route.arrived[rank]] = parts[rank]
            ring(peer.bell_fd)
        self._await_all()
        home_QH = torch.cat([parts[rank] if rank == self._rank else self._own[rank].outputs[:count]
                             for rank, count in enumerate(route.sent)])  # fmt: skip
        y_QH = torch.empty_like(home_QH).index_copy_(0, route.order_Q, home_QH)
        return torch.unflatten(y_QH, 0, (-1, route.num_topk))

    def close(self) -> None:
        """Nothing to agree on: the kernel frees slabs and doorbells with their last holder."""

    def _arrived_counts(self, sent_WE: Indices) -> Indices:
        """[W, E] pairs from each rank for each local expert; reads the chain words of the step's first exchange."""
        arrived_WE = np.stack([sent_WE[self._rank] if rank == self._rank else self._own[rank].header[1:]
                               for rank in range(self._shape.world_size)])  # fmt: skip
        self._chain.hear(
            lambda: [self._chain.own if rank == self._rank else int(self._own[rank].header[0])
                     for rank in range(self._shape.world_size)]
        )  # fmt: skip
        return arrived_WE

    def _await_all(self) -> None:
        """Take one ring of every peer. A peer may be one exchange ahead, never two: it needs this rank's ring too."""
        started = time.perf_counter()
        for rank in self._peers:
            if not has_rung(self._bells[rank]):
                self.waiting_for = f"rank {rank}"
                if not wait_for_ring(self._bells[rank], self._timeout_s):
                    raise self._timeout(rank)
                self.waiting_for = ""
        self._exchanged(started)

    def _exchanged(self, started: float) -> None:
        self.num_exchanges += 1
        self.exchange_s += time.perf_counter() - started

    def _timeout(self, rank: int) -> DispatchTimeout:
        return DispatchTimeout(
            f"rank {self._rank}: rank {rank} did not come to exchange {self.num_exchanges} within {self._timeout_s:g} s"
        )
