"""How probable the model thought its tokens: by its own logits, whatever was done to them before a draw."""

# Shape suffixes: L = rows asked for, V = vocabulary, K = best tokens

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch

from pegahpc.engine.ranking import all_ids, ids_of, order_keys, pieces
from pegahpc.wire.messages import TokenLogprob


@dataclass(frozen=True)
class Asked:
    """What one row has to tell: its token's logprob, and those of the row's `num_top` best."""

    token: int
    num_top: int


def token_logprobs(
    logits_LV: torch.Tensor, asked: ListLike[Asked], suppressed_ids: torch.Tensor | None = None
) -> list[TokenLogprob]:
    """The logprob and rank of each row's token, and the row's best tokens.

    Natural logarithms of the softmax over all of a row's logits as the model gave them, suppressed ids included: before
    masks, penalties, bias and temperature (vLLM's `raw_logprobs`). Exponentials are float32, sum and logarithm float64;
    a row's bits are its own. Suppressed ids take no rank and are never among the best; a token that is one of them (a
    prompt may have it) has the rank that it would take.

    Args:
        logits_LV: [len(asked), vocab], float32; the suppressed ids are overwritten.
    """
    found: list[TokenLogprob] = []
    for rows in pieces(len(asked), logits_LV.shape[-1]):
        found += _logprobs(logits_LV[rows], asked[rows], suppressed_ids)
    return found


def _logprobs(
    logits_LV: torch.Tensor, asked: ListLike[Asked], suppressed_ids: torch.Tensor | None
) -> list[TokenLogprob]:
    token_L1 = torch.tensor([[each.token] for each in asked], device=logits_LV.device)
    logit_L1 = logits_LV.gather(-1, token_L1)
    log_sum_L1 = _log_sum_exp(logits_LV)
    if suppressed_ids is not None:
        logits_LV.index_fill_(-1, suppressed_ids, -torch.inf)
    keys_LV = order_keys(logits_LV, all_ids(logits_LV))
    rank_L = (keys_LV < order_keys(logit_L1, token_L1)).sum(-1) + 1
    num_best = min(max(each.num_top for each in asked), logits_LV.shape[-1])
    ids_LK = ids_of(keys_LV.topk(num_best, dim=-1, largest=False).values)
    best_LK = logits_LV.gather(-1, ids_LK) - log_sum_L1
    columns = ((logit_L1 - log_sum_L1)[:, 0], rank_L, ids_LK, best_LK)
    return [
        TokenLogprob(each.token, logprob, rank, _shown(ids[: each.num_top], best[: each.num_top]))
        for each, logprob, rank, ids, best in zip(asked, *(column.tolist() for column in columns), strict=True)
    ]


def _shown(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    """Without what is suppressed: where fewer tokens than asked for can be drawn, the list is shorter."""
    return [(idx, logprob) for idx, logprob in zip(ids, logprobs, strict=True) if logprob != -torch.inf]


def _log_sum_exp(logits_LV: torch.Tensor) -> torch.Tensor:
    """[L, 1], float64."""
    top_L1 = logits_LV.amax(-1, keepdim=True)
    return top_L1.double() + _sum((logits_LV - top_L1).exp_().double()).log()


def _sum(values_LV: torch.Tensor) -> torch.Tensor:
    """[L, 1]: half added onto half until one is left, in place, so that a row's bits are its own on every device.

    torch.sum splits a row among threads when there are few rows, and a GPU's cumulative sums depend on their number.
    """
    width = values_LV.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        values_LV[:, : width - half] += values_LV[:, half:width]
        width = half
    return values_LV[:, :1]
