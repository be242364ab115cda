"""route_tokens against an oracle that shares no line with it: plain Python over one token at a time."""

import math

import pytest
import torch

from pegahpc.moe.router import route_tokens


def route_one(
    logits: list[float], bias: list[float], num_topk: int, num_groups: int, num_topk_groups: int, scale: float
) -> tuple[list[int], list[float]]:
    """The report's text, step by step."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // num_groups
    groups = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(num_groups)]
    kept = sorted(range(num_groups), key=lambda g: -groups[g])[:num_topk_groups]
    allowed = [e for e in range(len(logits)) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:num_topk]
    total = sum(scores[e] for e in chosen)
    return chosen, [scores[e] / total * scale for e in chosen]


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize(("num_experts", "num_groups", "num_topk_groups", "num_topk"), [(8, 1, 1, 2), (16, 4, 2, 3)])
def test_matches_the_oracle(
    num_tokens: int, num_experts: int, num_groups: int, num_topk_groups: int, num_topk: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) * 0.1
    shape = {"num_topk": num_topk, "num_groups": num_groups, "num_topk_groups": num_topk_groups}
    topk_idx, topk_weights = route_tokens(logits, bias, scale=2.5, **shape)
    assert topk_idx.shape == topk_weights.shape == (num_tokens, num_topk)
    for token in range(num_tokens):
        want_idx, want_weights = route_one(logits[token].tolist(), bias.tolist(), scale=2.5, **shape)
        assert topk_idx[token].tolist() == want_idx
        torch.testing.assert_close(topk_weights[token], torch.tensor(want_weights), rtol=1e-5, atol=1e-6)


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0])
    topk_idx, topk_weights = route_tokens(logits, bias, num_topk=1, num_groups=1, num_topk_groups=1, scale=1.0)
    assert topk_idx.tolist() == [[0]]
    assert topk_weights.tolist() == [[1.0]]


def test_groups_that_cannot_hold_topk_are_refused() -> None:
    with pytest.raises(ValueError, match="1 groups of 2 hold fewer than 3"):
        route_tokens(torch.zeros(1, 4), torch.zeros(4), num_topk=3, num_groups=2, num_topk_groups=1, scale=1.0)
