"""The official client's response types, held to the letter: nothing missing, nothing extra, nothing of another type."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def chat_of(data: bytes) -> ChatCompletion:
    """A whole chat answer."""
    return _held_to(ChatCompletion, json.loads(data))


def completion_of(data: bytes) -> Completion:
    """A whole completion.

    The type has no null in `token_logprobs` and `top_logprobs`, which OpenAI sends for an echoed prompt's first token.
    """
    document = json.loads(data)
    for choice in document["choices"]:
        for name in ("token_logprobs", "top_logprobs"):
            if choice["logprobs"] is not None and choice["logprobs"][name][:1] == [None]:
                choice["logprobs"][name].pop(0)
    return _held_to(Completion, document)


def chat_chunks_of(data: bytes) -> list[ChatCompletionChunk]:
    """A chat's stream, which ends with [DONE]."""
    return [_held_to(ChatCompletionChunk, document) for document in events_of(data)]


def completion_chunks_of(data: bytes) -> list[Completion]:
    """A completion's stream. The type is that of whole answers; of `finish_reason` null it knows nothing."""
    chunks = []
    for document in events_of(data):
        for choice in document["choices"]:
            if choice["finish_reason"] is None:
                choice["finish_reason"] = "content_filter"  # stands for null: we never send it
            if choice["logprobs"] is not None and choice["logprobs"]["token_logprobs"][:1] == [None]:
                choice["logprobs"]["token_logprobs"].pop(0)
                choice["logprobs"]["top_logprobs"].pop(0)
        chunks.append(_held_to(Completion, document))
    return chunks


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The documents of a stream that ends as it should."""
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _held_to(kind: type[Model], document: dict[str, Any]) -> Model:
    parsed = kind.model_validate(document, strict=True)
    assert parsed.model_dump(exclude_unset=True) == document
    assert _extra_of(parsed) == []
    return parsed


def _extra_of(value: object) -> list[str]:
    """Names that the types do not have, wherever they are."""
    if isinstance(value, BaseModel):
        inside = [name for each in value.__dict__.values() for name in _extra_of(each)]
        return [*(value.model_extra or {}), *inside]
    return [name for each in value for name in _extra_of(each)] if isinstance(value, list) else []
