"""What the gateway answers, as types: what is encoded as it stands here, and the forms of what is encoded in pieces."""

from __future__ import annotations

from typing import Literal

import msgspec

from pegahpc.gateway.errors import ErrorBody
from pegahpc.gateway.logprob_shapes import ChatLogprobs, CompletionLogprobs, PromptLogprob
from pegahpc.gateway.shapes import Usage

FinishReason = Literal["stop", "length"]
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly these fields; those with a default may be left out."""


class Error(Document, frozen=True):
    """Every answer that is no success, and the last event of a stream that breaks."""

    error: ErrorBody


class ModelCard(Document, frozen=True, kw_only=True):
    """One model; `created` is when the gateway read it, in seconds since the epoch."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pegahpc"
    max_model_len: int


class ModelList(Document, frozen=True, kw_only=True):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Pulse(Document, frozen=True):
    """One rank: its step, and for how long that has not moved."""

    rank: int
    step: int
    silent_for_s: float


class Health(Document, frozen=True, kw_only=True, omit_defaults=True):
    """All ranks, or with status "stalled" those that stand still."""

    status: Literal["ok", "draining", "stalled"]
    message: str | None = None
    ranks: list[Pulse]


class AssistantMessage(Document, frozen=True):
    """The answer to a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Document, frozen=True):
    """One of `n`."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Document, frozen=True):
    """POST /v1/chat/completions; `prompt_logprobs` where they were asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Document, frozen=True):
    """What is new of a message: its role first, then its text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Document, frozen=True):
    """What is new of one choice; `finish_reason` in its last event."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Document, frozen=True):
    """One event of a chat's stream; with `include_usage` the last has no choices and the usage, else that is null."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(Document, frozen=True):
    """One of `n` for each prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Document, frozen=True):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Document, frozen=True):
    """What is new of one choice; `finish_reason` in its last event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(Document, frozen=True):
    """One event of a completion's stream; with `include_usage` the last has no choices and the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
