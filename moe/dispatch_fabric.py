"""The house's own dispatcher: one-sided puts of actual rows into peers' slabs, in C (kernels/csrc/fabric.c)."""

# Shape suffixes: as in dispatch.py; W = ranks, E = local experts

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from pegahpc.kernels import native
from pegahpc.moe.dispatch import ChainView, ChainWords, Received
from pegahpc.moe.fabric import FabricPort, Peer, Slab, fetch

_POINTERS = ctypes.POINTER(ctypes.c_void_p)


class DispatchTimeout(RuntimeError):
    """A peer did not come to an exchange; the fleet ends."""


class _Fabric(ctypes.Structure):
    """`struct fabric` of fabric.c, field by field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("world_size", "rank", "num_local", "row_bytes", "timeout_ms")),
        ("doors", _POINTERS),
        ("bells", ctypes.POINTER(ctypes.c_int32)),
        *((name, _POINTERS) for name in ("out_header", "in_header", "out_rows", "in_rows", "out_back", "in_back")),
        ("waiting_for", ctypes.POINTER(ctypes.c_int64)),
        ("num_done", ctypes.c_int64),
    ]


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
        self.num_exchanges = 0
        self.exchange_s = 0.0
        self._shape, self._rank, self._timeout_s = shape, port.rank, timeout_s
        self._chain = ChainWords(shape.world_size)
        self._rest: Callable[..., int] = library.fabric_rest
        self._dispatch: Callable[..., int] = library.fabric_dispatch
        self._take_rows: Callable[..., None] = library.fabric_take_rows
        self._combine: Callable[..., int] = library.fabric_combine
        self._bell_fd, self._awaited = port.bell_fd, ctypes.c_int64(-1)
        own = Peer(Slab(port.slab_fd, shape), port.bell_fd)
        self._ranks = [peers.get(rank, own) for rank in range(shape.world_size)]
        self._fabric = self._struct(own.slab)
        self._at = ctypes.addressof(self._fabric)
        # Written by a dispatch and read by its combine; one of each is under way at most.
        self._order_Q = np.empty(shape.max_pairs, np.int64)
        self._sent_W, self._words_W = np.empty(shape.world_size, np.int64), np.empty(shape.world_size, np.int64)
        self._counts_WE = np.empty((shape.world_size, shape.num_local_experts), np.int64)
        arrays = (self._order_Q, self._sent_W, self._counts_WE, self._words_W)
        self._addresses = [array.ctypes.data for array in arrays]  # numpy takes a microsecond to tell one

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
    def waiting_for(self) -> str:
        """The peer that this rank waits for now; read by another thread while a call waits in C."""
        return "" if self._awaited.value < 0 else f"rank {self._awaited.value}"

    def doorbells(self) -> list[int]:
        self._check(self._rest(self._at))
        return [self._bell_fd]

    def begin_step(self, word: int) -> None:
        self._chain.begin(word)

    def chain_view(self) -> ChainView:
        return self._chain.view()

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_rows, num_topk = topk_idx_TK.shape
        x_TH, topk_idx_TK = x_TH.contiguous(), topk_idx_TK.contiguous()
        num_pairs = num_rows * num_topk
        assert num_pairs <= self._shape.max_pairs, "more rows than engine.max_rows_per_step"
        x_at, started = x_TH.data_ptr(), time.perf_counter()
        status = self._dispatch(
            self._at, x_at, topk_idx_TK.data_ptr(), num_pairs, num_topk, self._chain.own, *self._addresses
        )
        self._exchanged(status, started)
        self._chain.hear(self._words_W.tolist)
        group_sizes: list[int] = self._counts_WE.sum(0).tolist()
        rows_QH = x_TH.new_empty(sum(group_sizes), x_TH.shape[1])
        self._take_rows(self._at, x_at, num_topk, *self._addresses[:3], rows_QH.data_ptr())
        return Received(rows_QH=rows_QH, group_sizes=group_sizes, route=(num_rows, num_topk))

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        assert isinstance(received.route, tuple)
        out_QH = out_QH.contiguous()
        y_TKH = out_QH.new_empty(*received.route, out_QH.shape[1])
        started = time.perf_counter()
        status = self._combine(self._at, out_QH.data_ptr(), *self._addresses[:3], y_TKH.data_ptr())
        self._exchanged(status, started)
        return y_TKH

    def close(self) -> None:
        """Nothing to agree on: the kernel frees slabs and doorbells with their last holder."""

    def _exchanged(self, status: int, started: float) -> None:
        self._check(status)
        self.num_exchanges += 1
        self.exchange_s += time.perf_counter() - started

    def _check(self, status: int) -> None:
        """0, or 1 + the rank that did not come, or -errno."""
        if status > 0:
            raise DispatchTimeout(
                f"rank {self._rank}: rank {status - 1} did not come to exchange {self.num_exchanges}"
                f" within {self._timeout_s:g} s"
            )
        if status < 0:
            raise OSError(-status, "a doorbell of the fabric failed")

    def _struct(self, own: Slab) -> _Fabric:
        ranks, shape = range(self._shape.world_size), self._shape
        slabs = [peer.slab for peer in self._ranks]

        def pointers(addresses: list[int]) -> ctypes.Array[ctypes.c_void_p]:
            return (ctypes.c_void_p * shape.world_size)(*addresses)

        return _Fabric(
            shape.world_size, self._rank, self.num_local_experts, shape.hidden * shape.dtype.itemsize,
            round(self._timeout_s * 1e3),
            pointers([slab.door for slab in slabs]),
            (ctypes.c_int32 * shape.world_size)(*(peer.bell_fd for peer in self._ranks)),
            pointers([slab.header(self._rank) for slab in slabs]), pointers([own.header(rank) for rank in ranks]),
            pointers([slab.rows(self._rank) for slab in slabs]), pointers([own.rows(rank) for rank in ranks]),
            pointers([slab.outputs(self._rank) for slab in slabs]), pointers([own.outputs(rank) for rank in ranks]),
            ctypes.pointer(self._awaited), 0,
        )  # fmt: skip
