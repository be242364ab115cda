"""Routed experts that stay as their checkpoint packs them: an expert is unpacked when rows come to it.

The product is the one of `grouped_swiglu`, so packed and unpacked experts give the same bits.
"""

# Shape suffixes: R = rows of all groups, H = hidden, I = expert width, E = local experts

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegahpc.kernels.formats import Packed, unpack
from pegahpc.kernels.grouped_swiglu import grouped_swiglu_even, grouped_swiglu_torch
from pegahpc.kernels.registry import Kernel, register


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Stacks of matrices [num_local_experts, out, in], as stored; gate and up may be views of one tensor."""

    gate: Packed
    up: Packed
    down: Packed

    def unpacked(self, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert: [hidden, 2 * width], gate first, and [width, hidden], contiguous."""
        gate_up_IH = torch.cat((unpack(self.gate[expert]), unpack(self.up[expert])))
        gate_up_HI = gate_up_IH.to(dtype).t().contiguous()
        return gate_up_HI, unpack(self.down[expert]).to(dtype).t().contiguous()


@register("grouped_swiglu_packed", "torch")
def grouped_swiglu_packed_torch(x_RH: torch.Tensor, experts: PackedExperts, group_sizes: list[int]) -> torch.Tensor:
    """`grouped_swiglu` over packed experts; see there.

    Args:
        x_RH: [sum(group_sizes), hidden]; experts are unpacked to its dtype.
        group_sizes: rows of each local expert, 0 allowed.

    Returns:
        [sum(group_sizes), hidden], in the rows' order.
    """
    return _by_expert(grouped_swiglu_torch, x_RH, experts, group_sizes)


@register("grouped_swiglu_packed", "even", priority=10, supports=lambda place: place.device.type == "cpu")
def grouped_swiglu_packed_even(x_RH: torch.Tensor, experts: PackedExperts, group_sizes: list[int]) -> torch.Tensor:
    """Over `grouped_swiglu`'s backend of this name."""
    return _by_expert(grouped_swiglu_even, x_RH, experts, group_sizes)


def _by_expert(
    grouped_swiglu: Kernel, x_RH: torch.Tensor, experts: PackedExperts, group_sizes: list[int]
) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    for expert, rows_RH in enumerate(torch.split(x_RH, group_sizes)):
        if rows_RH.shape[0]:
            gate_up_HI, down_IH = experts.unpacked(expert, x_RH.dtype)
            outputs.append(grouped_swiglu(rows_RH, gate_up_HI[None], down_IH[None], [rows_RH.shape[0]]))
    return torch.cat(outputs) if outputs else torch.empty_like(x_RH)
