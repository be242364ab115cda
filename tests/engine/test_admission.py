"""Each reason why a request can never run here."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pegahpc.engine.admission import refusal
from pegahpc.vocabulary import Vocabulary
from pegahpc.wire.messages import BadRequest, CacheBudget, ContextLength, RejectReason, Request, Sampling

VOCABULARY = Vocabulary(100, suppressed=tuple(range(90, 100)), begin_suppressed=(0,))


def refusal_of(prompt: list[int], max_tokens: int, **sampling: Any) -> RejectReason | None:
    return refusal_of_request(prompt, max_tokens, sampling=Sampling(**sampling))


def refusal_of_request(prompt: list[int], max_tokens: int, **fields: Any) -> RejectReason | None:
    request = Request(id="r", prompt_tokens=prompt, max_tokens=max_tokens, **fields)
    return refusal(request, vocabulary=VOCABULARY, max_model_len=50, cache_tokens=40)


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
        ("presence_penalty", -2.01), ("presence_penalty", 2.01), ("presence_penalty", math.nan),
        ("frequency_penalty", -2.01), ("frequency_penalty", math.inf), ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
    ],
)  # fmt: skip
def test_sampling_out_of_bounds_is_refused_by_its_parameter(param: str, value: float) -> None:
    reason = refusal_of([3], 5, **{param: value})
    assert isinstance(reason, BadRequest) and reason.param == param and str(value) in reason.message


@pytest.mark.parametrize(
    ("param", "value"),
    [("temperature", 0.0), ("temperature", 1e-300), ("temperature", 1e300), ("top_p", 1.0), ("top_p", 1e-9),
     ("top_k", 0), ("top_k", 1 << 62), ("min_p", 0.0), ("min_p", 0.999), ("seed", 0), ("seed", (1 << 64) - 1),
     ("presence_penalty", -2.0), ("presence_penalty", 2.0), ("frequency_penalty", -2.0), ("frequency_penalty", 2.0),
     ("repetition_penalty", 5e-324), ("repetition_penalty", 1e308)],
)  # fmt: skip
def test_sampling_at_its_bounds_is_honoured(param: str, value: float) -> None:
    assert refusal_of([3], 5, **{param: value}) is None


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ([(100, 1.0)], "token 100 is outside the vocabulary of 100"),
        ([(3, 1.0), (-1, 1.0)], "token -1 is outside the vocabulary of 100"),
        ([(3, 100.5)], "100.5 must be in [-100, 100]"),
        ([(3, 1.0), (4, -math.inf)], "-inf must be in [-100, 100]"),
        ([(3, math.nan)], "nan must be in [-100, 100]"),
        ([(3, 1.0), (4, 1.0), (3, 2.0)], "token 3 is named twice"),
    ],
)
def test_a_bias_that_cannot_be_added_is_refused(bias: list[tuple[int, float]], message: str) -> None:
    assert refusal_of([3], 5, logit_bias=tuple(bias)) == BadRequest(param="logit_bias", message=message)


def test_a_bias_on_every_token_at_its_bounds_is_honoured() -> None:
    assert refusal_of([3], 5, logit_bias=tuple((token, 100.0 - 200 * (token % 2)) for token in range(100))) is None


@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, 21, 1 << 40])
def test_more_logprobs_than_there_may_be_are_refused(param: str, count: int) -> None:
    want = BadRequest(param=param, message=f"{count} must be from 0 to 20")
    assert refusal_of_request([3], 5, **{param: count}) == want
    for good in (None, 0, 20):
        assert refusal_of_request([3], 5, **{param: good}) is None


@pytest.mark.parametrize("count", [-1, 6, 1 << 40])
def test_a_least_length_that_is_none_of_the_answers_is_refused(count: int) -> None:
    want = BadRequest(param="min_tokens", message=f"{count} must be from 0 to max_tokens, 5")
    assert refusal_of_request([3], 5, min_tokens=count) == want
    assert refusal_of_request([3], 5, min_tokens=5) is None and refusal_of_request([3], 0, min_tokens=0) is None


def test_a_least_length_needs_a_token_that_does_not_stop() -> None:
    """Of 100 ids ten are never drawn, and one more not as the first."""
    want = BadRequest(param="min_tokens", message="every token that can be drawn is a stop token")
    stops = tuple(range(1, 90))
    assert refusal_of_request([3], 5, min_tokens=1, stop_token_ids=stops) == want
    assert refusal_of_request([3], 5, min_tokens=1, stop_token_ids=(*stops[1:], 200, 201)) is None
    assert refusal_of_request([3], 5, min_tokens=0, stop_token_ids=stops) is None
