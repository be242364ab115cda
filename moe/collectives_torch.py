"""Collectives of torch.distributed: gloo between processes on CPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pegahpc.moe.dispatch import Indices


class TorchCollectives:
    """A process group of all ranks. The one place where it is made; its ports bind GLOO_SOCKET_IFNAME and have no key.

    Raises:
        RuntimeError: not all ranks came to the store within timeout_s.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        self.rank, self.world_size, self.waiting_for = rank, world_size, ""

    def exchange_counts(self, sent: Indices) -> Indices:
        sent_WN = torch.from_numpy(sent)
        answer_WN = torch.empty_like(sent_WN)
        self.waiting_for = "peers"
        dist.all_to_all_single(answer_WN, sent_WN)
        self.waiting_for = ""
        answer: Indices = answer_WN.numpy()
        return answer

    def exchange_rows(self, rows: torch.Tensor, sent: list[int], arrived: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(arrived), rows.shape[1])
        self.waiting_for = "peers"
        dist.all_to_all_single(out, rows, arrived, sent)
        self.waiting_for = ""
        return out

    def close(self) -> None:
        dist.destroy_process_group()
