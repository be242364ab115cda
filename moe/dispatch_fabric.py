"""The house's own dispatcher: one-sided puts of actual rows into peers' slabs, and doorbells, in C."""

# Shape suffixes: as in dispatch.py

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from pegahpc.kernels import native
from pegahpc.moe.dispatch import ChainView, Received
from pegahpc.moe.exchanges import Exchanges
from pegahpc.moe.fabric import FabricPort, Peer, Slab, fetch


class FabricDispatcher:
    """Two exchanges a layer, the same list on every rank in every step: rows with their counts, then outputs.

    Every rank arrives at every peer in each exchange, with or without rows. A window is written again only after its
    owner has read it: a rank puts the next layer's rows when all outputs have come home, which a peer sends after
    reading this layer's rows; and it puts outputs when all rows have arrived, which a peer sends after it read the
    last ones.

    Args:
        peers: every other rank's slab and doorbell.
    """

    def __init__(self, port: FabricPort, peers: dict[int, Peer], *, timeout_s: float) -> None:
        shape, library = port.shape, native.library()
        assert library is not None, "the plan chooses the fabric only where its C code is to be had"
        self.num_local_experts = shape.num_local_experts
        self.first_expert = port.rank * shape.num_local_experts
        own = Peer(Slab(port.slab_fd, shape), port.bell_fd)
        ranks = [peers.get(rank, own) for rank in range(shape.world_size)]
        self.exchanges = Exchanges(shape, port.rank, ranks, timeout_s=timeout_s)
        self._bell_fd, self._at = port.bell_fd, ctypes.addressof(self.exchanges.fabric)
        self._rest: Callable[..., int] = library.fabric_rest
        self._dispatch: Callable[..., int] = library.fabric_dispatch
        self._take_rows: Callable[..., None] = library.fabric_take_rows
        self._combine: Callable[..., int] = library.fabric_combine

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

    @property
    def num_exchanges(self) -> int:
        return int(self.exchanges.fabric.num_done)

    @property
    def exchange_s(self) -> float:
        return float(self.exchanges.fabric.exchange_ns * 1e-9)

    @property
    def waiting_for(self) -> str:
        return self.exchanges.waiting_for

    def doorbells(self) -> list[int]:
        status = self._rest(self._at)
        if status:
            raise OSError(-status, "a doorbell of the fabric failed")
        return [self._bell_fd]

    def begin_step(self, word: int) -> None:
        self.exchanges.chain.begin(word)

    def chain_view(self) -> ChainView:
        return self.exchanges.chain.view()

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_rows, num_topk = topk_idx_TK.shape
        x_TH, topk_idx_TK, exchanges = x_TH.contiguous(), topk_idx_TK.contiguous(), self.exchanges
        num_pairs, word = num_rows * num_topk, exchanges.chain.own
        assert num_pairs <= exchanges.shape.max_pairs, "more rows than engine.max_rows_per_step"
        exchanges.heard(
            self._dispatch(
                self._at, x_TH.data_ptr(), topk_idx_TK.data_ptr(), num_pairs, num_topk, word, *exchanges.addresses
            )
        )
        group_sizes: list[int] = exchanges.counts_WE.sum(0).tolist()
        rows_QH = x_TH.new_empty(sum(group_sizes), x_TH.shape[1])
        self._take_rows(self._at, x_TH.data_ptr(), num_topk, *exchanges.addresses[:3], rows_QH.data_ptr())
        return Received(rows_QH=rows_QH, group_sizes=group_sizes, route=(num_rows, num_topk))

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        assert isinstance(received.route, tuple)
        out_QH = out_QH.contiguous()
        y_TKH = out_QH.new_empty(*received.route, out_QH.shape[1])
        self.exchanges.heard(
            self._combine(self._at, out_QH.data_ptr(), *self.exchanges.addresses[:3], y_TKH.data_ptr())
        )
        return y_TKH

    def close(self) -> None:
        """Nothing to agree on: the kernel frees slabs and doorbells with their last holder."""
