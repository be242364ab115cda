"""From logits to tokens: a draw is a function of (request seed, position), so neighbours and reruns change nothing."""

# Shape suffixes: S = rows to sample, V = vocabulary

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch

from pegahpc.wire.messages import Sampling

MASK_64 = (1 << 64) - 1
TOKEN_DRAW = 0  # purpose of a draw: the request's next token


@dataclass(frozen=True)
class Draw:
    """One row to sample: how, and the position (index in the sequence) of the token that is drawn."""

    sampling: Sampling
    position: int


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


def sample(logits_SV: torch.Tensor, draws: ListLike[Draw]) -> tuple[list[int], list[bool]]:
    """Tokens of the first len(draws) rows, and whether each row's logits were finite (else its token is void).

    Greedy (temperature 0) is the argmax, ties to the lowest id. Otherwise: temperature, then min_p, then top_k, then
    top_p over what is left, then one draw by inverse of the cumulative probabilities, most probable token first.

    Args:
        logits_SV: [at least len(draws), vocab], float32.
    """
    logits_SV = logits_SV[: len(draws)]
    finite = logits_SV.isfinite().all(-1).tolist()
    tokens: list[int] = logits_SV.argmax(-1).tolist()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0 and finite[row]:
            tokens[row] = _draw(logits_SV[row], draw)
    return tokens, finite


def _draw(logits_V: torch.Tensor, draw: Draw) -> int:
    """One sampled token, in float64 so that the cumulative sum of a large vocabulary is exact enough."""
    sampling = draw.sampling
    sorted_V, ids_V = logits_V.double().sort(descending=True, stable=True)
    # Relative to the most probable token, which has 1; the difference comes first: a quotient may overflow.
    probs_V = ((sorted_V - sorted_V[0]) / sampling.temperature).exp()
    if sampling.min_p > 0:
        probs_V = probs_V[: int((probs_V >= sampling.min_p).sum())]
    if sampling.top_k > 0:
        probs_V = probs_V[: sampling.top_k]
    mass_V = probs_V.cumsum(0)
    if sampling.top_p < 1:  # the smallest head whose mass reaches top_p
        mass_V = mass_V[: int((mass_V < sampling.top_p * mass_V[-1]).sum()) + 1]
    target = uniform(sampling.seed, draw.position) * float(mass_V[-1])
    chosen = min(int((mass_V <= target).sum()), mass_V.shape[0] - 1)
    return int(ids_V[chosen])
