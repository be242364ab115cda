"""Token-choice routing: scores, groups, bias; the chosen experts in ascending id, which fixes the order of sums."""

# Shape suffixes: T = tokens, E = experts, G = groups, K = experts chosen a token (num_topk), H = hidden

from __future__ import annotations

import torch

from pegahpc.kernels.registry import register
from pegahpc.kernels.swiglu import logistic


@register("route_tokens", "torch")
def route_tokens_torch(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    *,
    scoring: str,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    group_best: int,
    norm_topk_prob: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose num_topk experts for each token; ties go to the lowest id.

    The bias moves the choice only; the weights come from the unbiased scores.

    Args:
        logits_TE: [num_tokens, num_experts], float32, the gate's output.
        bias_E: [num_experts], float32, `e_score_correction_bias`; None for methods without one.
        scoring: "softmax" or "sigmoid".
        num_topk: experts a token.
        num_groups: experts are split evenly into this many groups, in expert order.
        num_topk_groups: groups that a token may choose from.
        group_best: a group's score is the sum of this many best experts of it (1 or 2).
        norm_topk_prob: divide the weights by their sum.
        scale: `routed_scaling_factor`, times every weight.

    Returns:
        topk_idx_TK: [num_tokens, num_topk], int64, ascending in each row.
        topk_weights_TK: [num_tokens, num_topk], float32.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.2; DeepSeek-V3 (arXiv:2412.19437), section 2.1.2.
    """
    scores_TE = logistic(logits_TE) if scoring == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if num_groups > 1:
        kept_TE = _kept_experts(choice_TE, num_groups, num_topk_groups, group_best)
        choice_TE = choice_TE.masked_fill(~kept_TE, float("-inf"))
    topk_idx_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_topk]
    topk_idx_TK = topk_idx_TK.sort(dim=-1).values
    weights_TK = scores_TE.gather(1, topk_idx_TK)
    if norm_topk_prob:
        weights_TK = weights_TK / (_sum_in_order(weights_TK).unsqueeze(-1) + 1e-20)
    return topk_idx_TK, weights_TK * scale


def _kept_experts(choice_TE: torch.Tensor, num_groups: int, num_topk_groups: int, group_best: int) -> torch.Tensor:
    """[num_tokens, num_experts], bool: experts of the groups that a token may choose from."""
    group_size = choice_TE.shape[1] // num_groups
    choice_TGX = choice_TE.view(-1, num_groups, group_size)
    group_scores_TG = choice_TGX.topk(min(group_best, group_size)).values.sum(-1)
    kept_idx = group_scores_TG.sort(dim=-1, descending=True, stable=True).indices[:, :num_topk_groups]
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept_idx, True)
    return kept_TG.repeat_interleave(group_size, dim=1)


@register("weighted_sum", "torch")
def weighted_sum_torch(y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[num_tokens, hidden], float32: sum_k weights[t, k] * y[t, k], one addition after the other in k."""
    return _sum_in_order(y_TKH.float() * weights_TK.unsqueeze(-1))


def _sum_in_order(x_TK: torch.Tensor) -> torch.Tensor:
    """Sum over dim 1 by one addition after the other: a reduction may group terms by how many rows stand beside."""
    total_T = x_TK[:, 0]
    for slot in range(1, x_TK.shape[1]):
        total_T = total_T + x_TK[:, slot]
    return total_T
