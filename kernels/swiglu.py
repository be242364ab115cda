"""SwiGLU's elementwise half: silu(gate) * up."""

from __future__ import annotations

import torch
from torch.nn import functional

from pegahpc.kernels.registry import register


@register("silu_and_mul", "torch")
def silu_and_mul_torch(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * intermediate], gate first, to [num_tokens, intermediate]."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return functional.silu(gate_TI) * up_TI
