"""SwiGLU's elementwise half: silu(gate) * up."""

from __future__ import annotations

import torch

from pegahpc.kernels.registry import register


def logistic(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), by operations that give an element the same bits wherever it stands in its tensor.

    torch.sigmoid and silu do not: on the CPU the vector loop and the scalar loop over the last elements differ.
    """
    return torch.exp(-x).add_(1).reciprocal_()


@register("silu_and_mul", "torch")
def silu_and_mul_torch(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * intermediate], gate first, to [num_tokens, intermediate]; silu in float32, rounded once."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    gate32_TI = gate_TI.float()
    return (gate32_TI * logistic(gate32_TI)).to(gate_TI.dtype) * up_TI
