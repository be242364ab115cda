"""Token-choice routing with group limits and a load-balancing bias (DeepSeek-V3)."""

# Shape suffixes: T = tokens, E = experts, G = groups, K = experts chosen a token (num_topk)

from __future__ import annotations

import torch


def route_tokens(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose num_topk experts for each token.

    The bias moves the choice only; the weights come from the unbiased scores, sum to `scale`, and are in
    the chosen experts' order (best biased score first).

    Args:
        logits_TE: [num_tokens, num_experts], float32, the gate's output before the sigmoid.
        bias_E: [num_experts], float32, `e_score_correction_bias` of the checkpoint.
        num_topk: experts a token.
        num_groups: experts are split evenly into this many groups, in expert order.
        num_topk_groups: groups a token may choose from; a group's score is the sum of its best two experts.
        scale: `routed_scaling_factor` of the checkpoint, no unit.

    Returns:
        topk_idx_TK: [num_tokens, num_topk], int64, expert indices in [0, num_experts).
        topk_weights_TK: [num_tokens, num_topk], float32.

    Raises:
        ValueError: num_experts is not a multiple of num_groups, or the allowed groups hold fewer than
            num_topk experts.

    Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 2.1.2.
    """
    num_tokens, num_experts = logits_TE.shape
    if num_experts % num_groups:
        raise ValueError(f"num_experts {num_experts} is not a multiple of num_groups {num_groups}")
    group_size = num_experts // num_groups
    if num_topk_groups * group_size < num_topk:
        raise ValueError(f"{num_topk_groups} groups of {group_size} hold fewer than {num_topk} experts")

    scores_TE = logits_TE.sigmoid()
    biased_TE = scores_TE + bias_E
    group_scores_TG = biased_TE.view(num_tokens, num_groups, group_size).topk(min(2, group_size)).values.sum(-1)
    kept_groups = group_scores_TG.topk(num_topk_groups).indices
    kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept_groups, True)
    kept_TE = kept_TG.repeat_interleave(group_size, dim=1)

    topk_idx_TK = biased_TE.masked_fill(~kept_TE, float("-inf")).topk(num_topk).indices
    weights_TK = scores_TE.gather(1, topk_idx_TK)
    return topk_idx_TK, weights_TK / weights_TK.sum(-1, keepdim=True) * scale
