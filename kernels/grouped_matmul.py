"""Grouped products: consecutive groups of rows, each with the weight of its expert."""

# Shape suffixes: R = rows of all groups, I = input features, O = output features, E = local experts

from __future__ import annotations

import torch

from pegahpc.kernels.matmul_rows import EVEN_CHUNK, matmul_rows_tiles
from pegahpc.kernels.registry import register


@register("grouped_matmul", "torch")
def grouped_matmul_torch(x_RI: torch.Tensor, w_EIO: torch.Tensor, group_sizes: list[int]) -> torch.Tensor:
    """Group e is the next group_sizes[e] rows of x and is multiplied by w_EIO[e]; in fixed row tiles.

    Args:
        x_RI: [sum(group_sizes), in].
        w_EIO: [num_local_experts, in, out].
        group_sizes: rows of each local expert, 0 allowed.

    Returns:
        [sum(group_sizes), out], in the rows' order.
    """
    groups = x_RI.split(group_sizes)
    return torch.cat([matmul_rows_tiles(group, w_IO) for group, w_IO in zip(groups, w_EIO, strict=True)])


@register("grouped_matmul", "even", priority=10, supports=lambda place: place.device.type == "cpu")
def grouped_matmul_even(x_RI: torch.Tensor, w_EIO: torch.Tensor, group_sizes: list[int]) -> torch.Tensor:
    """One product a group, into one output; groups must have even sizes (`EVEN_ALIGNMENT`)."""
    out_RO = x_RI.new_empty(x_RI.shape[0], w_EIO.shape[2])
    start = 0
    for expert, size in enumerate(group_sizes):
        for first in range(start, start + size, EVEN_CHUNK):
            last = min(first + EVEN_CHUNK, start + size)
            torch.mm(x_RI[first:last], w_EIO[expert], out=out_RO[first:last])
        start += size
    return out_RO
