"""Whether a request can ever run here: the typed reason why not, or None."""

from __future__ import annotations

import math

from pegahpc.wire.messages import BadRequest, CacheBudget, ContextLength, RejectReason, Request, Sampling


def refusal(request: Request, *, vocab_size: int, max_model_len: int, cache_tokens: int) -> RejectReason | None:
    """Honour or reject: what passes here can never make a later step fail.

    Args:
        max_model_len: prompt and generated tokens together.
        cache_tokens: tokens that the whole pool holds.
    """
    num_prompt = len(request.prompt_tokens)
    if not num_prompt:
        return BadRequest(param="prompt_tokens", message="the prompt is empty")
    wrong = next((token for token in request.prompt_tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        return BadRequest(param="prompt_tokens", message=f"token {wrong} is outside the vocabulary of {vocab_size}")
    if request.max_tokens < 0:
        return BadRequest(param="max_tokens", message=f"{request.max_tokens} is negative")
    if (fault := _sampling_fault(request.sampling)) is not None:
        return fault
    if num_prompt + request.max_tokens > max_model_len:
        return ContextLength(prompt_tokens=num_prompt, max_tokens=request.max_tokens, limit=max_model_len)
    if num_prompt + request.max_tokens > cache_tokens:
        return CacheBudget(tokens=num_prompt + request.max_tokens, limit=cache_tokens)
    return None


def _sampling_fault(sampling: Sampling) -> BadRequest | None:
    checks = (
        ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "finite and not negative"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "not negative"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p < 1, "in [0, 1)"),
        ("seed", sampling.seed, 0 <= sampling.seed < 1 << 64, "an unsigned 64-bit integer"),
    )
    for param, value, is_good, must_be in checks:
        if not is_good:
            return BadRequest(param=param, message=f"{value} must be {must_be}")
    return None
