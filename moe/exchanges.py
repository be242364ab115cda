"""The fabric's exchanges in C (kernels/csrc/fabric.c), for a dispatcher and for a program of compiled layers."""

# Shape suffixes: Q = (row, expert) pairs, W = ranks, E = local experts

from __future__ import annotations

import ctypes
from typing import ClassVar

import numpy as np

from pegahpc.moe.dispatch import ChainWords
from pegahpc.moe.fabric import Peer, Slab, SlabShape

_POINTERS = ctypes.POINTER(ctypes.c_void_p)


class DispatchTimeout(RuntimeError):
    """A peer did not come to an exchange; the fleet ends."""


class Fabric(ctypes.Structure):
    """`struct fabric` of ops.h, field by field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("world_size", "rank", "num_local", "row_bytes", "timeout_ms")),
        ("doors", _POINTERS),
        ("bells", ctypes.POINTER(ctypes.c_int32)),
        *((name, _POINTERS) for name in ("out_header", "in_header", "out_rows", "in_rows", "out_back", "in_back")),
        ("waiting_for", ctypes.POINTER(ctypes.c_int64)),
        ("num_done", ctypes.c_int64),
        ("exchange_ns", ctypes.c_int64),
    ]


class Exchanges:
    """One rank's side: addresses that C code uses, and what its calls return made into words of ours.

    Args:
        ranks: every rank's slab and doorbell, the own one too.
    """

    def __init__(self, shape: SlabShape, rank: int, ranks: list[Peer], *, timeout_s: float) -> None:
        world_size = shape.world_size
        self.shape, self.rank, self._timeout_s = shape, rank, timeout_s
        self.chain = ChainWords(world_size)
        self._awaited = ctypes.c_int64(-1)
        self._ranks = ranks  # their memory must live
        self.fabric = self._struct([peer.slab for peer in ranks], [peer.bell_fd for peer in ranks])
        # Written by a dispatch and read by its combine; one of each is under way at most.
        self._order_Q = np.empty(shape.max_pairs, np.int64)
        self._sent_W, self._words_W = np.empty(world_size, np.int64), np.empty(world_size, np.int64)
        self.counts_WE = np.empty((world_size, shape.num_local_experts), np.int64)
        arrays = (self._order_Q, self._sent_W, self.counts_WE, self._words_W)
        self.addresses = [array.ctypes.data for array in arrays]  # numpy takes a microsecond to tell one

    @classmethod
    def alone(cls, shape: SlabShape) -> Exchanges:
        """Of a world of one rank, which waits for nobody."""
        assert shape.world_size == 1
        return cls(shape, 0, [Peer(Slab(-1, shape), -1)], timeout_s=0.0)

    @property
    def max_pairs(self) -> int:
        """(row, expert) pairs that this rank may send in one exchange."""
        return self.shape.max_pairs

    @property
    def max_received(self) -> int:
        """Rows that may arrive in one exchange."""
        return self.shape.world_size * self.shape.max_pairs

    @property
    def waiting_for(self) -> str:
        """The peer that this rank waits for now; read by another thread while a call waits in C."""
        rank = self._awaited.value  # once: C code writes it meanwhile
        return "" if rank < 0 else f"rank {rank}"

    def heard(self, status: int) -> None:
        """Exchanges are over: take their chain words, or raise what went wrong.

        Args:
            status: 0, or 1 + the rank that did not come, or -errno.

        Raises:
            DispatchTimeout, OSError.
        """
        if status > 0:
            raise DispatchTimeout(
                f"rank {self.rank}: rank {status - 1} did not come to exchange {self.fabric.num_done}"
                f" within {self._timeout_s:g} s"
            )
        if status < 0:
            raise OSError(-status, "a doorbell of the fabric failed")
        self.chain.hear(self._words_W.tolist)

    def _struct(self, slabs: list[Slab], bells: list[int]) -> Fabric:
        shape, ranks, own = self.shape, range(self.shape.world_size), slabs[self.rank]

        def pointers(addresses: list[int]) -> ctypes.Array[ctypes.c_void_p]:
            return (ctypes.c_void_p * shape.world_size)(*addresses)

        return Fabric(
            shape.world_size, self.rank, shape.num_local_experts, shape.hidden * shape.dtype.itemsize,
            round(self._timeout_s * 1e3),
            pointers([slab.door for slab in slabs]),
            (ctypes.c_int32 * shape.world_size)(*bells),
            pointers([slab.header(self.rank) for slab in slabs]), pointers([own.header(rank) for rank in ranks]),
            pointers([slab.rows(self.rank) for slab in slabs]), pointers([own.rows(rank) for rank in ranks]),
            pointers([slab.outputs(self.rank) for slab in slabs]), pointers([own.outputs(rank) for rank in ranks]),
            ctypes.pointer(self._awaited), 0, 0,
        )  # fmt: skip
