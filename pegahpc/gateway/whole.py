"""An answer as one document, when it is not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pegahpc.gateway.logprob_shapes import prompt_logprobs
from pegahpc.gateway.output import Output
from pegahpc.gateway.shapes import Answer, PromptTokensDetails, Usage


def whole(answer: Answer, outputs: Sequence[Output], texts: Sequence[str]) -> bytes:
    """The document of all choices, prompt by prompt, the best of their candidates.

    Args:
        outputs: of all candidates, at their end, and their `texts`.
    """
    generation = answer.generation
    chosen = best(outputs, num_candidates=generation.num_candidates, num_choices=generation.num_choices)
    document = answer.head(answer.shape.whole_object) | {
        "choices": [_choice(answer, index, outputs[idx], texts[idx]) for index, idx in enumerate(chosen)],
        "usage": usage_of(outputs, num_candidates=generation.num_candidates),
    }
    if answer.shape.has_prompt_logprobs_on_top:
        document |= _prompt_logprobs(answer, outputs[0])
    return msgspec.json.encode(document)


def best(outputs: Sequence[Output], *, num_candidates: int, num_choices: int) -> list[int]:
    """Which candidates are the choices: of each prompt the first ones, by mean logprob where not all are."""
    chosen: list[int] = []
    for first in range(0, len(outputs), num_candidates):
        candidates = list(range(first, first + num_candidates))
        if num_candidates > num_choices:
            candidates.sort(key=lambda idx: -outputs[idx].mean_logprob)  # stable: of equals the first
        chosen += candidates[:num_choices]
    return chosen


def usage_of(outputs: Sequence[Output], *, num_candidates: int) -> Usage:
    """Of all candidates; a prompt, and what the cache had of it, counts once."""
    firsts = outputs[::num_candidates]
    num_prompt_tokens = sum(output.num_prompt_tokens for output in firsts)
    num_tokens = sum(output.num_tokens for output in outputs)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(output.num_cached_tokens for output in firsts)),
    )


def _choice(answer: Answer, index: int, output: Output, text: str) -> dict[str, Any]:
    return {
        "index": index,
        **answer.shape.whole_choice(text),
        "logprobs": answer.logprobs(output.take_shown()),
        "finish_reason": output.finish_reason,
        **({} if answer.shape.has_prompt_logprobs_on_top else _prompt_logprobs(answer, output)),
    }


def _prompt_logprobs(answer: Answer, output: Output) -> dict[str, Any]:
    """vLLM's extra field, only for who asked for it."""
    num_top = answer.generation.prompt_logprobs
    if num_top is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs, num_top, answer.token_bytes)}
