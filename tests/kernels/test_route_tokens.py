"""Every routing backend against an oracle that shares no line with it: plain Python over one token at a time."""

import math
from typing import Any

import pytest
import torch

import pegahpc.kernels.selected  # noqa: F401  (registers)
from pegahpc.kernels.registry import Place, backends_of, select

CPU = Place(device=torch.device("cpu"))
BACKENDS = backends_of("route_tokens", CPU)


def route_one(logits: list[float], bias: list[float], shape: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The reports' text, step by step."""
    top = max(logits)
    if shape["scoring"] == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x - top) for x in logits)
        scores = [math.exp(x - top) / total for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // shape["num_groups"]
    best = shape["group_best"]
    groups = [sum(sorted(biased[g * size : (g + 1) * size])[-best:]) for g in range(shape["num_groups"])]
    kept = sorted(range(len(groups)), key=lambda g: -groups[g])[: shape["num_topk_groups"]]
    allowed = [e for e in range(len(logits)) if e // size in kept]
    chosen = sorted(sorted(allowed, key=lambda e: -biased[e])[: shape["num_topk"]])
    norm = sum(scores[e] for e in chosen) if shape["norm_topk_prob"] else 1.0
    return chosen, [scores[e] / norm * shape["scale"] for e in chosen]


def shape_of(**changes: object) -> dict[str, Any]:
    plain = {"scoring": "sigmoid", "num_topk": 2, "num_groups": 1, "num_topk_groups": 1, "group_best": 2,
             "norm_topk_prob": True, "scale": 2.5}  # fmt: skip
    return plain | changes


SHAPES = {
    "v3": shape_of(),
    "v3 in groups": shape_of(num_groups=4, num_topk_groups=2, num_topk=3),
    "v2": shape_of(scoring="softmax", group_best=1, norm_topk_prob=False, scale=1.0, num_topk=5),
    "v2 in groups": shape_of(scoring="softmax", group_best=1, norm_topk_prob=False, num_groups=4, num_topk_groups=3),
    "all experts": shape_of(num_topk=16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("name", SHAPES)
def test_matches_the_oracle(backend: str, num_tokens: int, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, 16, generator=generator)
    bias = torch.randn(16, generator=generator) * 0.1
    idx, weights = select("route_tokens", CPU, backend)(logits, bias, **SHAPES[name])
    assert idx.shape == weights.shape == (num_tokens, SHAPES[name]["num_topk"])
    for token in range(num_tokens):
        want_idx, want_weights = route_one(logits[token].tolist(), bias.tolist(), SHAPES[name])
        assert idx[token].tolist() == want_idx
        torch.testing.assert_close(weights[token], torch.tensor(want_weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bias_moves_the_choice_and_not_the_weights(backend: str) -> None:
    logits, bias = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([9.0, 0.0, 0.0, 0.0])
    idx, weights = select("route_tokens", CPU, backend)(logits, bias, **shape_of(num_topk=1, scale=1.0))
    assert idx.tolist() == [[0]]
    assert weights.tolist() == [[1.0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_ties_go_to_the_lowest_expert(backend: str, scoring: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    idx, _ = select("route_tokens", CPU, backend)(logits, None, **shape_of(scoring=scoring, num_topk=3))
    assert idx.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_keeps_its_bits_whatever_stands_beside_it(backend: str) -> None:
    logits = torch.randn(33, 16, generator=torch.Generator().manual_seed(2))
    route = select("route_tokens", CPU, backend)
    whole = route(logits, None, **SHAPES["v3 in groups"])
    for rows in (slice(0, 1), slice(5, 8), slice(20, 33)):
        part = route(logits[rows].contiguous(), None, **SHAPES["v3 in groups"])
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])
