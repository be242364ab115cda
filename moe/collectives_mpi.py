"""Collectives of MPI (mpi4py), for jobs that mpirun or srun starts. Upper-case calls only: buffers, no pickle."""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

from pegahpc.moe.dispatch import Indices


class MpiCollectives:
    """The world of an MPI job; its rank numbers are the fleet's."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank, self.world_size, self.waiting_for = self._comm.rank, self._comm.size, ""

    def exchange_counts(self, sent: Indices) -> Indices:
        answer: Indices = np.empty_like(sent)
        self.waiting_for = "peers"
        self._comm.Alltoall(sent, answer)
        self.waiting_for = ""
        return answer

    def exchange_rows(self, rows: torch.Tensor, sent: list[int], arrived: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(arrived), rows.shape[1])
        size = rows.shape[1] * rows.element_size()
        self.waiting_for = "peers"
        self._comm.Alltoallv(_bytes(rows, sent, size), _bytes(out, arrived, size))
        self.waiting_for = ""
        return out

    def close(self) -> None:
        """Leave together; MPI_Finalize, which the interpreter's end calls, waits for all all the same."""
        self._comm.Barrier()


def _bytes(
    rows: torch.Tensor, counts: list[int], size: int
) -> tuple[object, tuple[list[int], list[int]], MPI.Datatype]:
    """A buffer for Alltoallv: raw bytes, whatever the dtype, with each rank's count and displacement."""
    starts = np.cumsum([0, *counts[:-1]]) * size
    return rows.view(torch.uint8).numpy(), ([count * size for count in counts], starts.tolist()), MPI.BYTE
