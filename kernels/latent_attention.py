"""Latent attention in absorbed form over a paged cache: every head reads the same rows.

A row of the cache is [latent | rotated key]. The reduction over a context runs in splits of SPLIT_TOKENS tokens, in
order; a split is always computed whole, with what lies beyond the context masked. So a query row's bits depend on
its own context alone: not on how many rows, splits or neighbours the step has.
"""

# Shape suffixes: T = query rows, N = heads, C = latent dims, D = latent + rotary dims, S = tokens of a split,
# P = pages, G = contexts (1: all rows share one context; T: each row has its own)

from __future__ import annotations

import torch

from pegahpc.kernels.registry import register

SPLIT_TOKENS = 256
MASKED = 1e30  # taken off a hidden token's score; no finite score outweighs it
SMALLEST = -80.0  # below this exp is denormal, which costs up to 100 times an ordinary exp; e^-80 is 2e-35


def _weights(scores_TNS: torch.Tensor, visible_T1S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - max) of visible tokens, exactly 0 for hidden ones, and the max of each row and head."""
    max_TN1 = scores_TNS.add_((visible_T1S - 1) * MASKED).amax(-1, keepdim=True)
    return scores_TNS.sub_(max_TN1).clamp_min_(SMALLEST).exp_().mul_(visible_T1S), max_TN1


@register("latent_attention", "torch")
def latent_attention_torch(
    q_TND: torch.Tensor,
    rows_XPD: torch.Tensor,
    block_idx_GP: torch.Tensor,
    seq_lens_T: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """Attend from query rows to their contexts.

    Args:
        q_TND: [num_rows, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed queries.
        rows_XPD: [num_blocks, page_tokens, kv_lora_rank + qk_rope_head_dim], the cache as a list of blocks; finite.
        block_idx_GP: [1 or num_rows, pages], int64, blocks of each context in order; whole splits of SPLIT_TOKENS
            tokens, where entries beyond a context name any block (the padding page's).
        seq_lens_T: [num_rows], int64, at least 1: tokens that the row sees.
        kv_lora_rank: the first dims of a cache row, which are also the values.
        scale: softmax scale.

    Returns:
        [num_rows, num_heads, kv_lora_rank], dtype of q: softmax(q k^T * scale) v, per head.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.2 (absorption); merging of splits as in FlashDecoding.
    """
    num_rows, num_heads, dim = q_TND.shape
    max_TN1 = q_TND.new_full((num_rows, num_heads, 1), -MASKED, dtype=torch.float32)
    sum_TN1 = torch.zeros_like(max_TN1)
    out_TNC = q_TND.new_zeros(num_rows, num_heads, kv_lora_rank, dtype=torch.float32)
    tokens_S = torch.arange(SPLIT_TOKENS, device=q_TND.device)
    for split, block_idx in enumerate(torch.split(block_idx_GP, SPLIT_TOKENS // rows_XPD.shape[1], dim=1)):
        kv_GSD = rows_XPD.index_select(0, block_idx.reshape(-1)).view(-1, SPLIT_TOKENS, dim)
        kv_TSD = kv_GSD.expand(num_rows, SPLIT_TOKENS, dim)
        scores_TNS = torch.bmm(q_TND, kv_TSD.transpose(1, 2)).float().mul_(scale)
        visible_TS = (tokens_S + split * SPLIT_TOKENS < seq_lens_T[:, None]).float()
        weights_TNS, split_max_TN1 = _weights(scores_TNS, visible_TS.unsqueeze(1))
        new_max_TN1 = torch.maximum(max_TN1, split_max_TN1)
        values_TNC = torch.bmm(weights_TNS.to(kv_TSD.dtype), kv_TSD[..., :kv_lora_rank]).float()
        old_TN1, new_TN1 = (max_TN1 - new_max_TN1).exp_(), (split_max_TN1 - new_max_TN1).exp_()
        sum_TN1 = sum_TN1 * old_TN1 + weights_TNS.sum(-1, keepdim=True) * new_TN1
        out_TNC = out_TNC * old_TN1 + values_TNC * new_TN1
        max_TN1 = new_max_TN1
    return (out_TNC / sum_TN1).to(q_TND.dtype)
