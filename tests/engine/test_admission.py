"""Each reason why a request can never run here."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pegahpc.engine.admission import refusal
from pegahpc.wire.messages import BadRequest, CacheBudget, ContextLength, RejectReason, Request, Sampling


def refusal_of(prompt: list[int], max_tokens: int, **sampling: Any) -> RejectReason | None:
    request = Request(id="r", prompt_tokens=prompt, max_tokens=max_tokens, sampling=Sampling(**sampling))
    return refusal(request, vocab_size=100, max_model_len=50, cache_tokens=40)


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [([0], 0), ([99], 39), ([1] * 40, 0), ([1] * 39, 1), ([0, 99, 50], 37)]
)
def test_what_fits_is_admitted(prompt: list[int], max_tokens: int) -> None:
    assert refusal_of(prompt, max_tokens) is None


def test_an_empty_prompt_is_refused() -> None:
    assert refusal_of([], 5) == BadRequest(param="prompt_tokens", message="the prompt is empty")


@pytest.mark.parametrize("token", [-1, 100, 1 << 40])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    want = BadRequest(param="prompt_tokens", message=f"token {token} is outside the vocabulary of 100")
    assert refusal_of([3, token, 4], 5) == want


def test_a_negative_count_of_tokens_is_refused() -> None:
    assert refusal_of([3], -1) == BadRequest(param="max_tokens", message="-1 is negative")


@pytest.mark.parametrize(("prompt", "max_tokens"), [([1] * 50, 1), ([1] * 51, 0), ([1], 50), ([1], (1 << 64) - 1)])
def test_more_than_the_context_is_refused_with_the_numbers(prompt: list[int], max_tokens: int) -> None:
    assert refusal_of(prompt, max_tokens) == ContextLength(prompt_tokens=len(prompt), max_tokens=max_tokens, limit=50)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([1] * 40, 1), ([1] * 41, 0), ([1], 49)])
def test_more_than_the_cache_is_refused_with_the_numbers(prompt: list[int], max_tokens: int) -> None:
    assert refusal_of(prompt, max_tokens) == CacheBudget(tokens=len(prompt) + max_tokens, limit=40)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan),
        ("top_p", 0.0), ("top_p", -1.0), ("top_p", 1.01), ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1), ("min_p", 1.0), ("min_p", math.nan),
        ("seed", -1), ("seed", 1 << 64),
    ],
)  # fmt: skip
def test_sampling_out_of_bounds_is_refused_by_its_parameter(param: str, value: float) -> None:
    reason = refusal_of([3], 5, **{param: value})
    assert isinstance(reason, BadRequest) and reason.param == param and str(value) in reason.message


@pytest.mark.parametrize(
    ("param", "value"),
    [("temperature", 0.0), ("temperature", 1e-300), ("temperature", 1e300), ("top_p", 1.0), ("top_p", 1e-9),
     ("top_k", 0), ("top_k", 1 << 62), ("min_p", 0.0), ("min_p", 0.999), ("seed", 0), ("seed", (1 << 64) - 1)],
)  # fmt: skip
def test_sampling_at_its_bounds_is_honoured(param: str, value: float) -> None:
    assert refusal_of([3], 5, **{param: value}) is None
