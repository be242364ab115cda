"""Ops that are made once from their weights, in the layout that a backend likes: one matrix, one SwiGLU.

A made op is registered as its maker, `make(parts, **weights) -> function`. `parts` composes it from the plain ops that
were chosen for the same place: the reference, and the fallback everywhere. A maker owns the weights it is given.
"""

# Shape suffixes: T = rows, I = input features, O = output features, H = hidden, W = width of the FFN

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegahpc.kernels.registry import Kernel, register

if TYPE_CHECKING:
    from pegahpc.kernels.selected import PlainOps


@register("linear", "parts")
def linear_parts(parts: PlainOps, *, w_IO: torch.Tensor) -> Kernel:
    """(x_TI) -> x @ w."""
    return lambda x_TI: parts.matmul_rows(x_TI, w_IO)


@register("swiglu", "parts")
def swiglu_parts(parts: PlainOps, *, gate_up_HW: torch.Tensor, down_WH: torch.Tensor) -> Kernel:
    """(x_TH) -> down(silu(gate(x)) * up(x)); gate_up is [hidden, 2 * width], gate first."""

    def swiglu(x_TH: torch.Tensor) -> torch.Tensor:
        gate_up_TW = parts.matmul_rows(x_TH, gate_up_HW)
        out_TH: torch.Tensor = parts.matmul_rows(parts.silu_and_mul(gate_up_TW), down_WH)
        return out_TH

    return swiglu
