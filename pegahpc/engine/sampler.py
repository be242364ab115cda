"""From logits to tokens: a draw is a function of (request seed, position), so neighbours and reruns change nothing."""

# Shape suffixes: S = rows to sample, D = of those, rows that draw (not greedy), P = rows of a piece, V = vocabulary

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch

from pegahpc.engine.logit_edits import LogitEdits, edit_logits
from pegahpc.engine.ranking import all_ids, in_order, pieces
from pegahpc.wire.messages import Sampling

MASK_64 = (1 << 64) - 1
TOKEN_DRAW = 0  # purpose of a draw: the request's next token


@dataclass(frozen=True)
class Draw:
    """One row to sample: how, and the position (index in the sequence) of the token that is drawn."""

    sampling: Sampling
    position: int
    edits: LogitEdits | None = None  # penalties and bias; None: the request has none
    banned_ids: tuple[int, ...] = ()  # not to be drawn here, beside the vocabulary's suppressed ids


def uniform(seed: int, position: int, purpose: int = TOKEN_DRAW) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments always and everywhere.

    Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014), once over each argument.
    """
    state = seed & MASK_64
    for word in (position, purpose):
        state = _mix((state + 0x9E3779B97F4A7C15 * (word + 1)) & MASK_64)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def sample(
    logits_SV: torch.Tensor, draws: ListLike[Draw], suppressed_ids: torch.Tensor | None = None
) -> tuple[list[int], list[bool]]:
    """Tokens of the first len(draws) rows, and whether each row's logits were finite (else its token is void).

    In order: suppressed and banned ids, repetition penalty, presence and frequency penalty, bias (`edit_logits`). Then
    greedy (temperature 0) is the argmax, ties to the lowest id; otherwise temperature, min_p, top_k, and top_p over
    what is left, then one draw by inverse of the cumulative probabilities.

    Args:
        logits_SV: [at least len(draws), vocab], float32; edited in place.
        suppressed_ids: [num], int64: ids that are never drawn; at least one more id is left in every row.
    """
    logits_SV = logits_SV[: len(draws)]
    if not draws:
        return [], []
    finite = are_finite(logits_SV)
    edit_logits(logits_SV, draws, suppressed_ids)
    tokens: list[int] = logits_SV.max(-1).indices.tolist()
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and finite[row]]
    if drawn:
        logits_DV = logits_SV if len(drawn) == len(draws) else logits_SV[drawn]
        for row, token in zip(drawn, _draw(logits_DV, [draws[row] for row in drawn]), strict=True):
            tokens[row] = token
    return tokens, finite


def are_finite(logits_SV: torch.Tensor) -> list[bool]:
    """Whether all of a row's logits are; NaN comes through both."""
    finite: list[bool] = (logits_SV.amax(-1).isfinite() & logits_SV.amin(-1).isfinite()).tolist()
    return finite


def _draw(logits_DV: torch.Tensor, draws: ListLike[Draw]) -> list[int]:
    """One sampled token a row, in pieces of bounded memory; rows that are cut by rank apart from those that are not."""
    tokens = [0] * len(draws)
    is_cut = [draw.sampling.top_k > 0 or draw.sampling.top_p < 1 for draw in draws]
    for draw_rows, cut in ((_along_ids, False), (_along_ranks, True)):
        rows = [row for row, each in enumerate(is_cut) if each == cut]
        for piece in (rows[each] for each in pieces(len(rows), logits_DV.shape[-1])):
            drawn = draw_rows(logits_DV[piece], _Settings([draws[row] for row in piece], logits_DV))
            for row, token in zip(piece, drawn[:, 0].tolist(), strict=True):
                tokens[row] = token
    return tokens


class _Settings:
    """Parameters of a piece's rows, each [P, 1], float64 but for num_kept, which is vocab where top_k is off."""

    def __init__(self, draws: ListLike[Draw], like: torch.Tensor) -> None:
        vocab, all_sampling = like.shape[-1], [draw.sampling for draw in draws]
        rows = [(s.temperature, s.min_p, s.top_p, uniform(s.seed, d.position))
                for s, d in zip(all_sampling, draws, strict=True)]  # fmt: skip
        table = torch.tensor(rows, dtype=torch.float64, device=like.device)
        self.temperature, self.min_p, self.top_p, self.uniform = table.T.contiguous()[..., None].unbind()
        self.num_kept = torch.tensor([[min(s.top_k, vocab) or vocab] for s in all_sampling], device=like.device)
        self.has_top_k = any(s.top_k > 0 for s in all_sampling)
        self.has_min_p = any(s.min_p > 0 for s in all_sampling)


def _along_ids(logits_PV: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """[P, 1]: tokens drawn by the inverse of the probabilities' cumulative sum in order of id."""
    mass_PV = _weights(logits_PV, settings).cumsum(-1)
    return _first_above(mass_PV, mass_PV[:, -1:], settings)


def _along_ranks(logits_PV: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """[P, 1]: the same from the most probable token on, over the ranks that top_k and top_p leave."""
    logits_PV, ids_PV = in_order(logits_PV)
    weights_PV = _weights(logits_PV, settings)
    if settings.has_top_k:
        weights_PV *= all_ids(weights_PV) < settings.num_kept
    mass_PV = weights_PV.cumsum(-1)
    last_P1 = torch.searchsorted(mass_PV, settings.top_p * mass_PV[:, -1:])  # of the smallest head that has top_p
    return ids_PV.gather(-1, _first_above(mass_PV, mass_PV.gather(-1, last_P1), settings))


def _weights(logits_PV: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """Probabilities relative to the row's most probable token, which has 1; 0 below min_p.

    In float64, so that the cumulative sum of a large vocabulary is exact enough.
    """
    top_P1 = logits_PV.amax(-1, keepdim=True)
    weights_PV = logits_PV.double().sub_(top_P1).div_(settings.temperature).exp_()  # a quotient first may overflow
    return weights_PV.mul_(weights_PV >= settings.min_p) if settings.has_min_p else weights_PV


def _first_above(mass_PV: torch.Tensor, total_P1: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """[P, 1]: the first place whose cumulative mass is above this draw's share of the total."""
    below_P1 = total_P1.nextafter(torch.zeros_like(total_P1))  # a share that rounds up to the total stays inside
    return torch.searchsorted(mass_PV, torch.minimum(settings.uniform * total_P1, below_P1), right=True)
