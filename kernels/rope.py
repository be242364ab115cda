"""Rotary position embedding over interleaved pairs (x0, x1), (x2, x3), ... as the DeepSeek checkpoints store them."""

# Shape suffixes: T = tokens, N = heads, R = rotary dims (even)

from __future__ import annotations

import torch

from pegahpc.kernels.registry import register


@register("rope_interleaved", "torch")
def rope_interleaved_torch(x_TNR: torch.Tensor, cis_TR: torch.Tensor) -> torch.Tensor:
    """Rotate each pair by its token's angle, in float32; pairs stay where they are.

    Only dot products of rotated queries with rotated keys are used, so the order of the output's dims is free, as
    long as both sides share it.

    Args:
        x_TNR: [num_tokens, num_heads, rotary_dim].
        cis_TR: [num_tokens, rotary_dim], float32: cos and sin of each pair's angle, interleaved.

    Source: RoFormer (arXiv:2104.09864), equation 34.
    """
    cos_T1R, sin_T1R = cis_TR[:, None, 0::2], cis_TR[:, None, 1::2]
    even_TNR, odd_TNR = x_TNR[..., 0::2].float(), x_TNR[..., 1::2].float()
    pairs = (even_TNR * cos_T1R - odd_TNR * sin_T1R, odd_TNR * cos_T1R + even_TNR * sin_T1R)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x_TNR.dtype)


@register("rope_interleaved", "complex", priority=10, supports=lambda place: place.dtype == torch.float32)
def rope_interleaved_complex(x_TNR: torch.Tensor, cis_TR: torch.Tensor) -> torch.Tensor:
    """The same as one complex product."""
    turn_T1R = torch.view_as_complex(cis_TR.unflatten(-1, (-1, 2))).unsqueeze(1)
    x_pairs = torch.view_as_complex(x_TNR.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x_pairs * turn_T1R).flatten(-2)
