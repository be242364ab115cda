"""The fields that are honoured: names, types, ranges, and the API's defaults. docs/sampling.md says what each means.

What stands here and in `no_ops` is all there is: any other field is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 20  # alternatives a token; OpenAI's bound for chats
MAX_CHOICES = 128  # of one request: prompts * the larger of n and best_of
MAX_STOP_STRINGS = 4
MAX_STOP_TOKENS = 128
MAX_BIASED_TOKENS = 1024

Count = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopString = Annotated[str, Meta(min_length=1)]  # an empty one would stop before the first token


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content. `type` is no tag: msgspec lets a tag be left out."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. `developer` is what OpenAI calls `system` today; templates know the older word."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """The dict that a chat template reads. Text parts are joined by newlines, as vLLM joins them."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the usage so far in every event, with one for tokens without text


class CommonFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints honour."""

    model: str
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: Count = 0
    n: NumChoices = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = 0  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # bounds that keep float32 logits finite
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASED_TOKENS)] = {}
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    prompt_logprobs: NumLogprobs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # whose request it is, for the client's own records


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    add_generation_prompt: bool | None = None  # by default true, unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None  # which ones there are is the template's to say


class CompletionFields(CommonFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]  # a text, token ids, or a list of one of the two
    max_tokens: Count | None = None  # 0: only the prompt is of interest
    best_of: NumChoices | None = None
    echo: bool = False
    logprobs: NumLogprobs | None = None
