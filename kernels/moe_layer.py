"""The parts of an MoE layer between its exchanges, made from their weights (see linear.py)."""

# Shape suffixes: T = rows, L = live rows, H = hidden, K = experts a row, E = local experts, R = rows of all groups,
# W = expert width (gate and up: 2 * width)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pegahpc.kernels.linear import swiglu_parts
from pegahpc.kernels.registry import Kernel, register

if TYPE_CHECKING:
    from pegahpc.kernels.selected import PlainOps


@register("router", "parts")
def router_parts(parts: PlainOps, *, gate_HE: torch.Tensor, bias_E: torch.Tensor | None, **how: Any) -> Kernel:
    """(x_TH) -> (topk_idx_TK, topk_weights_TK): the gate in float32, then `route_tokens`, whose arguments `how` are."""

    def route(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen: tuple[torch.Tensor, torch.Tensor] = parts.route_tokens(
            parts.matmul_rows(x_TH.float(), gate_HE), bias_E, **how
        )
        return chosen

    return route


@register("experts", "parts")
def experts_parts(parts: PlainOps, *, gate_up_EHW: torch.Tensor, down_EWH: torch.Tensor) -> Kernel:
    """(x_RH, group_sizes) -> [R, hidden]: `grouped_swiglu` with these weights."""
    return lambda x_RH, group_sizes: parts.grouped_swiglu(x_RH, gate_up_EHW, down_EWH, group_sizes)


@register("moe_output", "parts")
def moe_output_parts(
    parts: PlainOps, *, shared_gate_up_HW: torch.Tensor | None, shared_down_WH: torch.Tensor | None
) -> Kernel:
    """(x_TH, y_LKH, topk_weights_LK) -> [T, hidden]: shared(x), plus the weighted sum of y for the first L rows.

    Without a shared expert its part is zero. The sum is made in float32 and in the order of K.
    """
    shared = torch.zeros_like
    if shared_gate_up_HW is not None and shared_down_WH is not None:
        shared = swiglu_parts(parts, gate_up_HW=shared_gate_up_HW, down_WH=shared_down_WH)

    def output(x_TH: torch.Tensor, y_LKH: torch.Tensor, topk_weights_LK: torch.Tensor) -> torch.Tensor:
        out_TH: torch.Tensor = shared(x_TH)
        out_TH[: y_LKH.shape[0]] += parts.weighted_sum(y_LKH, topk_weights_LK).to(x_TH.dtype)
        return out_TH

    return output
