"""Token-choice routing: scores, groups, bias; the chosen experts in ascending id, which fixes the order of sums."""

# Shape suffixes: T = tokens, E = experts, G = groups, K = experts chosen a token (num_topk)

from __future__ import annotations

import torch

from pegahpc.moe.shape import RouterShape


def route_tokens(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, shape: RouterShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose num_topk experts for each token; ties go to the lowest id.

    The bias (noaux_tc) moves the choice only; the weights come from the unbiased scores.

    Args:
        logits_TE: [num_tokens, num_experts], float32, the gate's output.
        bias_E: [num_experts], float32, `e_score_correction_bias`; None for methods without one.

    Returns:
        topk_idx_TK: [num_tokens, num_topk], int64, ascending in each row.
        topk_weights_TK: [num_tokens, num_topk], float32, `routed_scaling_factor` included.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.2; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    scores_TE = logits_TE.sigmoid() if shape.scoring == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if shape.num_groups > 1:
        choice_TE = choice_TE.masked_fill(~_kept_experts(choice_TE, shape), float("-inf"))
    topk_idx_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, : shape.num_topk]
    topk_idx_TK = topk_idx_TK.sort(dim=-1).values
    weights_TK = scores_TE.gather(1, topk_idx_TK)
    if shape.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return topk_idx_TK, weights_TK if shape.scale == 1.0 else weights_TK * shape.scale


def _kept_experts(choice_TE: torch.Tensor, shape: RouterShape) -> torch.Tensor:
    """[num_tokens, num_experts], bool: experts of the groups that a token may choose from."""
    choice_TGX = choice_TE.unflatten(-1, (shape.num_groups, -1))
    best = 2 if shape.method == "noaux_tc" else 1
    group_scores_TG = choice_TGX.topk(min(best, choice_TGX.shape[-1])).values.sum(-1)
    kept_idx = group_scores_TG.sort(dim=-1, descending=True, stable=True).indices[:, : shape.num_topk_groups]
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept_idx, True)
    return kept_TG.repeat_interleave(choice_TGX.shape[-1], dim=1)
