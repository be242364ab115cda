"""Rotary positions, query rows and cache rows of latent attention, in one op: they touch the same few bytes."""

# Shape suffixes: T = tokens, N = heads, C = latent dims, R = rotary dims (even), D = C + R, X = nope + R,
# Y = cache rows

from __future__ import annotations

import torch

from pegahpc.kernels.registry import register


@register("latent_rows", "torch")
def latent_rows_torch(
    q_TNX: torch.Tensor,
    absorbed_NTC: torch.Tensor,
    latent_TC: torch.Tensor,
    k_pe_TR: torch.Tensor,
    cis_TR: torch.Tensor,
    cache_YD: torch.Tensor,
    row_idx_T: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, append [latent | rotated key] to the cache, and join [absorbed | rotated query].

    Args:
        q_TNX: [num_tokens, num_heads, nope + rotary], of which the last `rotary` dims are read.
        absorbed_NTC: [num_heads, num_tokens, latent], queries times W_UK.
        latent_TC: [num_tokens, latent], normed.
        k_pe_TR: [num_tokens, rotary], not yet rotated.
        cis_TR: [num_tokens, rotary], float32: cos and sin of each pair's angle, interleaved.
        cache_YD: [num_rows, latent + rotary], written at row_idx_T.
        row_idx_T: [num_tokens], int64; padding tokens may share one row.

    Returns:
        [num_tokens, num_heads, latent + rotary].
    """
    rotary = cis_TR.shape[1]
    pe_TMR = rotate(torch.cat((q_TNX[..., -rotary:], k_pe_TR.unsqueeze(1)), dim=1), cis_TR)
    cache_YD.index_copy_(0, row_idx_T, torch.cat((latent_TC, pe_TMR[:, -1]), dim=-1))
    return torch.cat((absorbed_NTC.transpose(0, 1), pe_TMR[:, :-1]), dim=-1)


def rotate(x_TNR: torch.Tensor, cis_TR: torch.Tensor) -> torch.Tensor:
    """Turn each interleaved pair (x0, x1), (x2, x3), ... by its token's angle, in float32; pairs stay where they are.

    Only dot products of rotated queries with rotated keys are used, so the order of the output's dims is free, as
    long as both sides share it.

    Source: RoFormer (arXiv:2104.09864), equation 34; the pairs' layout of the DeepSeek checkpoints.
    """
    cos_T1R, sin_T1R = cis_TR[:, None, 0::2], cis_TR[:, None, 1::2]
    even_TNR, odd_TNR = x_TNR[..., 0::2].float(), x_TNR[..., 1::2].float()
    pairs = (even_TNR * cos_T1R - odd_TNR * sin_T1R, odd_TNR * cos_T1R + even_TNR * sin_T1R)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x_TNR.dtype)
