"""The fabric dispatcher with its exchanges in C (kernels/csrc/fabric.c): one call puts, rings and waits."""

# Shape suffixes: as in dispatch.py; W = ranks, E = local experts

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pegahpc.kernels import native
from pegahpc.moe.dispatch import Indices, Received
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


@dataclass(frozen=True)
class _Sent:
    """What one dispatch knows and its combine needs."""

    order_Q: Indices  # pairs in order of their expert
    sent_W: Indices  # pairs to each rank
    counts_WE: Indices  # arrived pairs of each rank for each local expert
    num_rows: int
    num_topk: int


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
        world_size, num_local = self._shape.world_size, self.num_local_experts
        order_Q, sent_W = np.empty(num_rows * num_topk, np.int64), np.empty(world_size, np.int64)
        counts_WE, words_W = np.empty((world_size, num_local), np.int64), np.empty(world_size, np.int64)
        arrays = (order_Q, sent_W, counts_WE, words_W)
        started = time.perf_counter()
        status = self._dispatch(
            self._at,
            x_TH.data_ptr(),
            topk_idx_TK.data_ptr(),
            len(order_Q),
            num_topk,
            self._word,
            *(array.ctypes.data for array in arrays),
        )
        self._check(status, started)
        if self._is_first:
            self._words, self._is_first = words_W.tolist(), False
        group_sizes: list[int] = counts_WE.sum(0).tolist()
        rows_QH = x_TH.new_empty(sum(group_sizes), x_TH.shape[1])
        self._take_rows(
            self._at, x_TH.data_ptr(), num_topk, *(array.ctypes.data for array in arrays[:3]), rows_QH.data_ptr()
        )
        sent = _Sent(order_Q, sent_W, counts_WE, num_rows, num_topk)
        return Received(rows_QH=rows_QH, group_sizes=group_sizes, position_Q=_NO_PLACES, route=sent)

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        sent = received.route
        assert isinstance(sent, _Sent)
        out_QH = out_QH.contiguous()
        y_TKH = out_QH.new_empty(sent.num_rows, sent.num_topk, out_QH.shape[1])
        arrays = (sent.order_Q, sent.sent_W, sent.counts_WE)
        started = time.perf_counter()
        pointers = (array.ctypes.data for array in arrays)
        self._check(self._combine(self._at, out_QH.data_ptr(), *pointers, y_TKH.data_ptr()), started)
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


_NO_PLACES = torch.empty(0, dtype=torch.int64)


def connect(port: FabricPort, addresses: list[str], *, timeout_s: float) -> FabricDispatcher:
    """The fabric on this host, in C where the compiled kernels are to be had; ranks of both kinds work together."""
    kind = NativeFabricDispatcher if native.library() is not None else FabricDispatcher
    return kind.connect(port, addresses, timeout_s=timeout_s)
