"""Routed experts: consecutive groups of rows, each through the SwiGLU of its expert."""

# Shape suffixes: R = rows of all groups, H = hidden, I = expert width (gate and up: 2 * width), E = local experts

from __future__ import annotations

import torch

from pegahpc.kernels.matmul_rows import matmul_rows_even, matmul_rows_tiles
from pegahpc.kernels.registry import Kernel, register
from pegahpc.kernels.swiglu import silu_and_mul_torch


@register("grouped_swiglu", "torch")
def grouped_swiglu_torch(
    x_RH: torch.Tensor, gate_up_EHI: torch.Tensor, down_EIH: torch.Tensor, group_sizes: list[int]
) -> torch.Tensor:
    """Group e is the next group_sizes[e] rows of x and goes through expert e; in fixed row tiles.

    Args:
        x_RH: [sum(group_sizes), hidden].
        gate_up_EHI: [num_local_experts, hidden, 2 * width], gate first.
        down_EIH: [num_local_experts, width, hidden].
        group_sizes: rows of each local expert, 0 allowed.

    Returns:
        [sum(group_sizes), hidden], in the rows' order.
    """
    return _by_group(matmul_rows_tiles, x_RH, gate_up_EHI, down_EIH, group_sizes)


@register("grouped_swiglu", "even", priority=10, supports=lambda place: place.device.type == "cpu")
def grouped_swiglu_even(
    x_RH: torch.Tensor, gate_up_EHI: torch.Tensor, down_EIH: torch.Tensor, group_sizes: list[int]
) -> torch.Tensor:
    """As few products as groups; row-invariant where `matmul_rows.is_row_invariant` says so."""
    return _by_group(matmul_rows_even, x_RH, gate_up_EHI, down_EIH, group_sizes)


def _by_group(
    matmul: Kernel, x_RH: torch.Tensor, gate_up_EHI: torch.Tensor, down_EIH: torch.Tensor, group_sizes: list[int]
) -> torch.Tensor:
    outputs = [
        matmul(silu_and_mul_torch(matmul(rows_RH, gate_up_HI)), down_IH)
        for rows_RH, gate_up_HI, down_IH in zip(torch.split(x_RH, group_sizes), gate_up_EHI, down_EIH, strict=True)
        if rows_RH.shape[0]
    ]
    return torch.cat(outputs) if outputs else torch.empty_like(x_RH)
