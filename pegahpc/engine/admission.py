"""Whether a request can ever run here: the typed reason why not, or None."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pegahpc.vocabulary import Vocabulary
from pegahpc.wire.messages import (
    MAX_LOGPROBS,
    BadRequest,
    CacheBudget,
    ContextLength,
    RejectReason,
    Request,
    Sampling,
)

MAX_BIAS = 100  # as OpenAI's API has it


def refusal(request: Request, *, vocabulary: Vocabulary, max_model_len: int, cache_tokens: int) -> RejectReason | None:
    """Honour or reject: what passes here can never make a later step fail.

    Args:
        max_model_len: prompt and generated tokens together.
        cache_tokens: tokens that the whole pool holds.
    """
    num_prompt = len(request.prompt_tokens)
    if not num_prompt:
        return BadRequest(param="prompt_tokens", message="the prompt is empty")
    faults = (
        _foreign_token("prompt_tokens", request.prompt_tokens, vocabulary),
        _length_fault(request, vocabulary),
        _logprobs_fault("logprobs", request.logprobs),
        _logprobs_fault("prompt_logprobs", request.prompt_logprobs),
        _sampling_fault(request.sampling),
        _bias_fault(request.sampling.logit_bias, vocabulary),
    )
    if (fault := next(filter(None, faults), None)) is not None:
        return fault
    if num_prompt + request.max_tokens > max_model_len:
        return ContextLength(prompt_tokens=num_prompt, max_tokens=request.max_tokens, limit=max_model_len)
    if num_prompt + request.max_tokens > cache_tokens:
        return CacheBudget(tokens=num_prompt + request.max_tokens, limit=cache_tokens)
    return None


def _foreign_token(param: str, tokens: Iterable[int], vocabulary: Vocabulary) -> BadRequest | None:
    wrong = next((token for token in tokens if not 0 <= token < vocabulary.size), None)
    if wrong is None:
        return None
    return BadRequest(param=param, message=f"token {wrong} is outside the vocabulary of {vocabulary.size}")


def _length_fault(request: Request, vocabulary: Vocabulary) -> BadRequest | None:
    """An answer of min_tokens must be possible: something other than a stop token is left to draw."""
    at_least, at_most = request.min_tokens, request.max_tokens
    if at_most < 0:
        return BadRequest(param="max_tokens", message=f"{at_most} is negative")
    if not 0 <= at_least <= at_most:
        return BadRequest(param="min_tokens", message=f"{at_least} must be from 0 to max_tokens, {at_most}")
    if at_least and not vocabulary.leaves_any(without=request.stop_token_ids):
        return BadRequest(param="min_tokens", message="every token that can be drawn is a stop token")
    return None


def _logprobs_fault(param: str, num_top: int | None) -> BadRequest | None:
    if num_top is None or 0 <= num_top <= MAX_LOGPROBS:
        return None
    return BadRequest(param=param, message=f"{num_top} must be from 0 to {MAX_LOGPROBS}")


def _bias_fault(logit_bias: tuple[tuple[int, float], ...], vocabulary: Vocabulary) -> BadRequest | None:
    ids = [token for token, _ in logit_bias]
    if (fault := _foreign_token("logit_bias", ids, vocabulary)) is not None:
        return fault
    if len({*ids}) < len(ids):
        twice = next(token for place, token in enumerate(ids) if token in ids[:place])
        return BadRequest(param="logit_bias", message=f"token {twice} is named twice")
    wrong = next((bias for _, bias in logit_bias if not -MAX_BIAS <= bias <= MAX_BIAS), None)
    return (
        None
        if wrong is None
        else BadRequest(param="logit_bias", message=f"{wrong} must be in [-{MAX_BIAS}, {MAX_BIAS}]")
    )


def _sampling_fault(sampling: Sampling) -> BadRequest | None:
    checks = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "finite and not negative"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "not negative"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p < 1, "in [0, 1)"),
        ("presence_penalty", sampling.presence_penalty, -2 <= sampling.presence_penalty <= 2, "in [-2, 2]"),
        ("frequency_penalty", sampling.frequency_penalty, -2 <= sampling.frequency_penalty <= 2, "in [-2, 2]"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0 < sampling.repetition_penalty < math.inf,
            "finite and above 0",
        ),
        ("seed", sampling.seed, 0 <= sampling.seed < 1 << 64, "an unsigned 64-bit integer"),
    )
    for param, value, is_good, must_be in checks:
        if not is_good:
            return BadRequest(param=param, message=f"{value} must be {must_be}")
    return None
