"""The two halves of a latent attention layer around the attention itself, made from their weights (see linear.py)."""

# Shape suffixes: T = rows, H = hidden, N = heads, P = nope dims, C = latent dims, R = rotary dims, D = C + R,
# V = value dims, X = all outputs of the first product, Y = cache rows

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegahpc.kernels.registry import Kernel, register

if TYPE_CHECKING:
    from pegahpc.kernels.selected import PlainOps


@register("latent_project", "parts")
def latent_project_parts(
    parts: PlainOps,
    *,
    qkv_a_HX: torch.Tensor,
    q_a_norm: torch.Tensor | None,
    q_b: torch.Tensor | None,
    kv_a_norm_C: torch.Tensor,
    w_uk_NPC: torch.Tensor,
    rotary: int,
    eps: float,
) -> Kernel:
    """(x_TH, cis_TR, cache_YD, row_idx_T) -> queries [T, heads, latent + rotary], absorbed and rotated.

    The rows' latents and rotated keys are written to cache_YD at row_idx_T; the arguments are those of `latent_rows`.

    Args:
        qkv_a_HX: to the query's latent (or all query heads, without q_b), the latent, and the key's rotary dims.
    """
    num_heads, nope, latent = w_uk_NPC.shape
    num_q = qkv_a_HX.shape[1] - latent - rotary

    def project(
        x_TH: torch.Tensor, cis_TR: torch.Tensor, cache_YD: torch.Tensor, row_idx_T: torch.Tensor
    ) -> torch.Tensor:
        q_TX, latent_TC, k_pe_TR = parts.matmul_rows(x_TH, qkv_a_HX).split([num_q, latent, rotary], dim=-1)
        if q_b is not None:
            q_TX = parts.matmul_rows(parts.rms_norm(q_TX, q_a_norm, eps), q_b)
        latent_TC = parts.rms_norm(latent_TC, kv_a_norm_C, eps)
        q_TNX = q_TX.reshape(x_TH.shape[0], num_heads, nope + rotary)
        absorbed_NTC = parts.matmul_heads(q_TNX[..., :nope].transpose(0, 1), w_uk_NPC)
        q_TND: torch.Tensor = parts.latent_rows(q_TNX, absorbed_NTC, latent_TC, k_pe_TR, cis_TR, cache_YD, row_idx_T)
        return q_TND

    return project


@register("latent_output", "parts")
def latent_output_parts(parts: PlainOps, *, w_uv_NCV: torch.Tensor, o_proj: torch.Tensor) -> Kernel:
    """(out_TNC), what attention gave, -> [T, hidden]: values of each head, then the output projection."""

    def output(out_TNC: torch.Tensor) -> torch.Tensor:
        values_NTV = parts.matmul_heads(out_TNC.transpose(0, 1), w_uv_NCV)
        out_TH: torch.Tensor = parts.matmul_rows(values_NTV.transpose(0, 1).flatten(1), o_proj)
        return out_TH

    return output
