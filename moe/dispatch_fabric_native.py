"""The fabric dispatcher with its exchanges in C (kernels/csrc/fabric.c): one call puts, rings and waits."""

# Shape suffixes: as in dispatch.py; W = ranks, E = local experts

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from pegahpc.kernels import native
from pegahpc.moe.dispatch import Received
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.moe.fabric import FabricPort, Peer

_POINTERS = ctypes.POINTER(ctypes.c_void_p)


class _Fabric(ctypes.Structure):
    """`struct fabric` of fabric.c, field by field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("world_size", "rank", "num_local", "row_bytes", "timeout_ms")),
        *((name, _POINTERS) for name in ("out_header", "in_header", "out_rows", "in_rows", "out_back", "in_back")),
        ("out_bells", ctypes.POINTER(ctypes.c_int32)),
        ("in_bells", ctypes.POINTER(ctypes.c_int32)),
        ("waiting_for", ctypes.POINTER(ctypes.c_int64)),
    ]


class NativeFabricDispatcher(FabricDispatcher):
    """The same exchanges, bytes and order as FabricDispatcher, at a tenth of its cost on the host."""

    def __init__(self, port: FabricPort, peers: dict[int, Peer], *, timeout_s: float) -> None:
        super().__init__(port, peers, timeout_s=timeout_s)
        library = native.library()
        assert library is not None
        self._dispatch: Callable[..., int] = library.fabric_dispatch
        self._take_rows: Callable[..., None] = library.fabric_take_rows
        self._combine: Callable[..., int] = library.fabric_combine
        self._awaited = ctypes.c_int64(-1)
        self._fabric = self._struct()
        self._at = ctypes.addressof(self._fabric)
        # Written by a dispatch and read by its combine; one of each is under way at most.
        world_size, num_local = self._shape.world_size, self.num_local_experts
        self._order_Q = np.empty(self._shape.max_pairs, np.int64)
        self._sent_W, self._words_W = np.empty(world_size, np.int64), np.empty(world_size, np.int64)
        self._counts_WE = np.empty((world_size, num_local), np.int64)
        arrays = (self._order_Q, self._sent_W, self._counts_WE, self._words_W)
        self._addresses = [array.ctypes.data for array in arrays]  # numpy takes a microsecond to tell one

    @property
    def waiting_for(self) -> str:
        """The peer that this rank waits for now; read by another thread while a call waits in C."""
        return "" if self._awaited.value < 0 else f"rank {self._awaited.value}"

    @waiting_for.setter
    def waiting_for(self, whom: str) -> None:
        assert not whom, "the C code says whom it waits for"

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        num_rows, num_topk = topk_idx_TK.shape
        x_TH, topk_idx_TK = x_TH.contiguous(), topk_idx_TK.contiguous()
        num_pairs = num_rows * num_topk
        assert num_pairs <= self._shape.max_pairs, "more rows than engine.max_rows_per_step"
        x_at, started = x_TH.data_ptr(), time.perf_counter()
        status = self._dispatch(
            self._at, x_at, topk_idx_TK.data_ptr(), num_pairs, num_topk, self._chain.own, *self._addresses
        )
        self._check(status, started)
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
        self._check(status, started)
        return y_TKH

    def _check(self, status: int, started: float) -> None:
        if status > 0:
            raise self._timeout(status - 1)
        if status < 0:
            raise OSError(-status, "a doorbell of the fabric failed")
        self._exchanged(started)

    def _struct(self) -> _Fabric:
        world_size, shape = self._shape.world_size, self._shape
        out = [self._peers[rank].windows[self._rank] if rank in self._peers else None for rank in range(world_size)]
        bells = [self._peers[rank].bell_fd if rank in self._peers else -1 for rank in range(world_size)]

        def pointers(addresses: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
            return (ctypes.c_void_p * world_size)(*addresses)

        return _Fabric(
            world_size, self._rank, self.num_local_experts, shape.hidden * shape.dtype.itemsize,
            round(self._timeout_s * 1e3),
            pointers([window.header.ctypes.data if window else None for window in out]),
            pointers([window.header.ctypes.data for window in self._own]),
            pointers([window.rows.data_ptr() if window else None for window in out]),
            pointers([window.rows.data_ptr() for window in self._own]),
            pointers([window.outputs.data_ptr() if window else None for window in out]),
            pointers([window.outputs.data_ptr() for window in self._own]),
            (ctypes.c_int32 * world_size)(*bells),
            (ctypes.c_int32 * world_size)(*self._bells),
            ctypes.pointer(self._awaited),
        )  # fmt: skip


def connect(port: FabricPort, addresses: list[str], *, timeout_s: float) -> FabricDispatcher:
    """The fabric on this host, in C where the compiled kernels are to be had; ranks of both kinds work together."""
    kind = NativeFabricDispatcher if native.library() is not None else FabricDispatcher
    return kind.connect(port, addresses, timeout_s=timeout_s)
