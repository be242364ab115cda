"""Latent attention: projections, rotation, cache write, and the absorbed product over the paged cache."""

# Shape suffixes: T = tokens (rows of the step), H = hidden, N = heads, C = kv_lora_rank, D = C + rotary dims

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegahpc.kernels.program import RowContext
from pegahpc.kernels.selected import Kernels
from pegahpc.mla.shape import LatentShape


@dataclass(frozen=True, kw_only=True)
class LatentWeights:
    """One layer's weights, matrices stored [in, out]."""

    qkv_a_HX: torch.Tensor  # hidden -> q_lora_rank (or all query heads, without q_lora) + kv_lora_rank + rope
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor | None  # q_lora_rank -> heads * (nope + rope)
    kv_a_norm_C: torch.Tensor
    w_uk_NPC: torch.Tensor  # per head: nope -> latent, the keys' half of kv_b_proj
    w_uv_NCV: torch.Tensor  # per head: latent -> v, the values' half of kv_b_proj
    o_proj: torch.Tensor  # heads * v -> hidden


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """What every attention layer of one step shares."""

    cis_TR: torch.Tensor  # [num_rows, qk_rope_head_dim], float32
    row_idx_T: torch.Tensor  # [num_rows], int64: page * num_layers * page_tokens + offset in the page
    contexts: tuple[RowContext, ...]


class LayerCache:
    """One layer's view of the page-first slab [num_pages, num_layers, page_tokens, row_dim].

    All layers of a page are contiguous. Seen as a list of [page_tokens, row_dim] blocks, layer l of page p is block
    p * num_layers + l: the views start at the layer, so that every layer is read with the same indices.
    """

    def __init__(self, slab: torch.Tensor, layer: int) -> None:
        self.slab = slab
        _, _, page_tokens, row_dim = slab.shape
        self.blocks_XPD = slab.view(-1, page_tokens, row_dim)[layer:]
        self.rows_YD = slab.view(-1, row_dim)[layer * page_tokens :]


class LatentAttention:
    """One layer of multi-head latent attention, absorbed form for prefill and decode alike.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; names of the DeepSeek checkpoints.
    """

    def __init__(self, shape: LatentShape, weights: LatentWeights, kernels: Kernels) -> None:
        self.shape = shape
        self._attention = kernels.latent_attention
        self.project = kernels.latent_project(
            qkv_a_HX=weights.qkv_a_HX,
            q_a_norm=weights.q_a_norm,
            q_b=weights.q_b,
            kv_a_norm_C=weights.kv_a_norm_C,
            w_uk_NPC=weights.w_uk_NPC,
            rotary=shape.qk_rope_head_dim,
            eps=shape.latent_norm_eps,
        )
        self.output = kernels.latent_output(w_uv_NCV=weights.w_uv_NCV, o_proj=weights.o_proj)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep, cache: LayerCache) -> torch.Tensor:
        """[num_rows, hidden] to [num_rows, hidden]; appends the rows' latents to the cache first."""
        q_TND = self.project(x_TH, step.cis_TR, cache.rows_YD, step.row_idx_T)
        out: torch.Tensor = self.output(self._attend(q_TND, step, cache))
        return out

    def _attend(self, q_TND: torch.Tensor, step: AttentionStep, cache: LayerCache) -> torch.Tensor:
        outputs = [
            self._attention(
                q_TND[context.first_row : context.first_row + context.num_rows],
                cache.blocks_XPD,
                context.block_idx_GP,
                context.seq_lens_T,
                kv_lora_rank=self.shape.kv_lora_rank,
                scale=self.shape.softmax_scale,
            )
            for context in step.contexts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def expanded_attention(
    q_TNX: torch.Tensor,
    latent_SC: torch.Tensor,
    k_pe_SR: torch.Tensor,
    weights: LatentWeights,
    shape: LatentShape,
    *,
    first_position: int,
) -> torch.Tensor:
    """The expanded form, the reference of the absorbed one: keys and values of every head made from the latents.

    Args:
        q_TNX: [num_rows, num_heads, nope + rope], rope part rotated; row t stands at position first_position + t.
        latent_SC: [context, kv_lora_rank], normed latents of positions 0 to context - 1.
        k_pe_SR: [context, qk_rope_head_dim], rotated keys.

    Returns:
        [num_rows, num_heads * v_head_dim], before o_proj.
    """
    k_nope_NSP = torch.einsum("npc,sc->nsp", weights.w_uk_NPC, latent_SC)
    v_NSV = torch.einsum("ncv,sc->nsv", weights.w_uv_NCV, latent_SC)
    k_NSX = torch.cat((k_nope_NSP, k_pe_SR.expand(shape.num_heads, -1, -1)), dim=-1)
    scores_NTS = torch.einsum("tnx,nsx->nts", q_TNX, k_NSX).float() * shape.softmax_scale
    rows, columns = torch.arange(q_TNX.shape[0])[:, None] + first_position, torch.arange(latent_SC.shape[0])
    weights_NTS = scores_NTS.masked_fill(columns > rows, float("-inf")).softmax(-1).to(v_NSV.dtype)
    return torch.einsum("nts,nsv->tnv", weights_NTS, v_NSV).flatten(1)
