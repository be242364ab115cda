"""Latent attention in absorbed form over a paged cache: every head reads the same rows.

A row of the cache is [latent | rotated key]. The reduction over a context runs in splits of SPLIT_TOKENS tokens, in
order; a split is always computed whole, with what lies beyond the context masked. So a query row's bits depend on
its own context alone: not on how many rows, splits or neighbours the step has.
"""

# Shape suffixes: T = query rows, N = heads, C = latent dims, D = latent + rotary dims, S = tokens of a split,
# P = pages of a split, G = contexts (1: all rows share one context; T: each row has its own)

from __future__ import annotations

import torch

from pegahpc.kernels.registry import register

SPLIT_TOKENS = 256
MASKED = -1e30  # a score that no finite one is below: exp(MASKED - anything) is 0, and no inf - inf arises


@register("latent_attention", "torch")
def latent_attention_torch(
    q_TND: torch.Tensor,
    rows_XPD: torch.Tensor,
    page_idx_GP: torch.Tensor,
    is_hidden_TL: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """Attend from query rows to their contexts.

    Args:
        q_TND: [num_rows, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed queries.
        rows_XPD: [num_page_slots, page_tokens, kv_lora_rank + qk_rope_head_dim], the cache as a list of pages.
        page_idx_GP: [1 or num_rows, num_splits * SPLIT_TOKENS / page_tokens], int64, indices into rows_XPD; entries
            beyond a context name any page (the padding page), their tokens must be hidden.
        is_hidden_TL: [num_rows, num_splits * SPLIT_TOKENS], bool, True for tokens that the row does not see.
        kv_lora_rank: the first dims of a cache row, which are also the values.
        scale: softmax scale.

    Returns:
        [num_rows, num_heads, kv_lora_rank], dtype of q: softmax(q k^T * scale) v, per head.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 (absorption); merging of splits as in FlashDecoding.
    """
    num_rows, num_heads, dim = q_TND.shape
    page_tokens = rows_XPD.shape[1]
    pages_per_split = SPLIT_TOKENS // page_tokens
    max_TN1 = q_TND.new_full((num_rows, num_heads, 1), MASKED, dtype=torch.float32)
    sum_TN1 = torch.zeros_like(max_TN1)
    out_TNC = q_TND.new_zeros(num_rows, num_heads, kv_lora_rank, dtype=torch.float32)
    for split, page_idx in enumerate(page_idx_GP.split(pages_per_split, dim=1)):
        kv_GSD = rows_XPD.index_select(0, page_idx.flatten()).view(-1, SPLIT_TOKENS, dim)
        kv_TSD = kv_GSD.expand(num_rows, SPLIT_TOKENS, dim)
        scores_TNS = torch.bmm(q_TND, kv_TSD.transpose(1, 2)).float().mul_(scale)
        hidden_T1S = is_hidden_TL[:, None, split * SPLIT_TOKENS : (split + 1) * SPLIT_TOKENS]
        scores_TNS.masked_fill_(hidden_T1S, float("-inf"))
        split_max_TN1 = scores_TNS.amax(-1, keepdim=True).clamp_min_(MASKED)
        new_max_TN1 = torch.maximum(max_TN1, split_max_TN1)
        weights_TNS = scores_TNS.sub_(split_max_TN1).exp_()
        values_TNC = torch.bmm(weights_TNS.to(kv_TSD.dtype), kv_TSD[..., :kv_lora_rank]).float()
        old_TN1, new_TN1 = (max_TN1 - new_max_TN1).exp_(), (split_max_TN1 - new_max_TN1).exp_()
        sum_TN1 = sum_TN1 * old_TN1 + weights_TNS.sum(-1, keepdim=True) * new_TN1
        out_TNC = out_TNC * old_TN1 + values_TNC * new_TN1
        max_TN1 = new_max_TN1
    return (out_TNC / sum_TN1).to(q_TND.dtype)


@register("latent_attention", "aten", priority=10, supports=lambda place: place.dtype == torch.float32)
def latent_attention_aten(
    q_TND: torch.Tensor,
    rows_XPD: torch.Tensor,
    page_idx_GP: torch.Tensor,
    is_hidden_TL: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """The same bits as the reference in float32 with fewer passes: no merge where there is one split."""
    num_rows, _, dim = q_TND.shape
    if page_idx_GP.shape[1] * rows_XPD.shape[1] > SPLIT_TOKENS:
        return latent_attention_torch(
            q_TND, rows_XPD, page_idx_GP, is_hidden_TL, kv_lora_rank=kv_lora_rank, scale=scale
        )
    kv_GSD = rows_XPD.index_select(0, page_idx_GP.flatten()).view(-1, SPLIT_TOKENS, dim)
    kv_TSD = kv_GSD.expand(num_rows, SPLIT_TOKENS, dim)
    scores_TNS = torch.bmm(q_TND, kv_TSD.transpose(1, 2)).mul_(scale)
    scores_TNS.masked_fill_(is_hidden_TL[:, None], float("-inf"))
    weights_TNS = scores_TNS.sub_(scores_TNS.amax(-1, keepdim=True).clamp_min_(MASKED)).exp_()
    return torch.bmm(weights_TNS, kv_TSD[..., :kv_lora_rank]).div_(weights_TNS.sum(-1, keepdim=True))
