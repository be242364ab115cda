"""The documents of the two endpoints: what tells one from the other, and whole answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pegahpc.gateway.logprob_shapes import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobShape,
    chat_logprobs,
    completion_logprobs,
)
from pegahpc.gateway.model import ServedModel
from pegahpc.gateway.openai import Generation, parse_chat, parse_completion
from pegahpc.gateway.text import Shown


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the engine counted them: a prompt once, however many choices it has; of candidates all of them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What tells /v1/chat/completions from /v1/completions.

    Args:
        opening: a choice's first event in a stream; b"" where there is none.
        text_key: the choice's beginning, up to its text; `text_end` closes what it opens.
        last: the fields of the choice that carries the finish reason.
        has_prompt_logprobs_on_top: where they stand: beside the choices, or in each of them.
    """

    parse: Callable[[bytes, str], Generation]
    id_prefix: str
    whole_object: str
    chunk_object: str
    opening: bytes
    text_key: bytes
    text_end: bytes
    last: bytes
    whole_choice: Callable[[str], dict[str, Any]]
    logprobs: LogprobShape
    has_prompt_logprobs_on_top: bool


CHAT = Shape(
    parse=parse_chat,
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    opening=b'"delta":{"role":"assistant","content":""}',
    text_key=b'"delta":{"content":',
    text_end=b"}",
    last=b'"delta":{}',
    whole_choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    logprobs=chat_logprobs,
    has_prompt_logprobs_on_top=True,
)
COMPLETION = Shape(
    parse=parse_completion,
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    opening=b"",
    text_key=b'"text":',
    text_end=b"",
    last=b'"text":""',
    whole_choice=lambda text: {"text": text},
    logprobs=completion_logprobs,
    has_prompt_logprobs_on_top=False,
)


class Answer:
    """What all documents of one answer share.

    Args:
        token_bytes: what a token id stands for.
    """

    def __init__(self, shape: Shape, generation: Generation, *, request_id: str, model: ServedModel) -> None:
        self.shape = shape
        self.generation = generation
        self.token_bytes = model.codec.token_bytes
        self._head = {"id": request_id, "created": int(time.time()), "model": model.name}

    def head(self, kind: str) -> dict[str, Any]:
        """What each document begins with."""
        return {"object": kind, **self._head}

    def logprobs(self, shown: Sequence[Shown]) -> ChatLogprobs | CompletionLogprobs | None:
        """`logprobs` of a choice; None where they were not asked for."""
        num_top = self.generation.logprobs
        return None if num_top is None else self.shape.logprobs(shown, num_top, self.token_bytes)
