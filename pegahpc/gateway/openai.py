"""What the OpenAI API may ask: from a body to a typed `Generation`, or a refusal that names the field.

Every field is honoured, or refused by its name (`no_ops` has those that are refused unless they ask for nothing).
"""

from __future__ import annotations

import random
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pegahpc.gateway.errors import ApiError, refused_field, shorten
from pegahpc.gateway.no_ops import MESSAGE_NO_OPS, NO_OPS, STREAM_NO_OPS, without_no_ops
from pegahpc.wire.messages import Sampling

MAX_STOP_STRINGS = 4
MASK_64 = (1 << 64) - 1

PositiveInt = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """One part of a message's content."""

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


class CommonFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that both endpoints honour, with the API's defaults."""

    model: str
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = 0  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | list[str] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # whose request it is, for the client's own records


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]


class CompletionFields(CommonFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]


class Chat(msgspec.Struct, frozen=True):
    """Messages for the model's chat template."""

    messages: list[dict[str, str]]


Prompt = Chat | str | list[int]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for, checked; the same for both endpoints.

    Args:
        prompt: a chat, a text, or token ids.
        max_tokens: None where the client left it out.
    """

    prompt: Prompt
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    is_streamed: bool
    include_usage: bool

    @property
    def prompt_param(self) -> str:
        """The API's name of the prompt's field."""
        return "messages" if isinstance(self.prompt, Chat) else "prompt"


Fields = TypeVar("Fields", bound=CommonFields)


def parse_chat(body: bytes, model: str) -> Generation:
    """Check a body of /v1/chat/completions.

    Raises:
        ApiError: 400 naming the field, or 404 for a model that is not `model`.
    """
    fields = _read(body, ChatFields, model)
    return _generation(fields, prompt=Chat([message.for_template() for message in fields.messages]))


def parse_completion(body: bytes, model: str) -> Generation:
    """Check a body of /v1/completions.

    Raises:
        ApiError: 400 naming the field, or 404 for a model that is not `model`.
    """
    fields = _read(body, CompletionFields, model)
    return _generation(fields, prompt=_one_prompt(fields.prompt))


def _read(body: bytes, kind: type[Fields], model: str) -> Fields:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    try:
        fields = msgspec.convert(_asked_for(document, kind), kind)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    if fields.model != model:
        message = f"The model {shorten(fields.model)!r} does not exist; this fleet serves {model!r}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return fields


def _asked_for(document: dict[str, Any], kind: type[CommonFields]) -> dict[str, Any]:
    """The document without what asks for nothing: null for an optional field, and NO_OPS at their value."""
    asked = without_no_ops(_without_nulls(document, kind), NO_OPS, where="")
    if isinstance(options := asked.get("stream_options"), dict):
        options = _without_nulls(options, StreamOptions)
        asked["stream_options"] = without_no_ops(options, STREAM_NO_OPS, where="stream_options.")
    if isinstance(messages := asked.get("messages"), list):
        asked["messages"] = [
            without_no_ops(message, MESSAGE_NO_OPS, where=f"messages[{idx}].") if isinstance(message, dict) else message
            for idx, message in enumerate(messages)
        ]
    return asked


def _without_nulls(fields: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    known = kind.__struct_fields__
    return {name: value for name, value in fields.items() if value is not None or name not in known}


def _named(error: msgspec.ValidationError) -> ApiError:
    """The refusal of a document that does not fit, with the field that msgspec names in its text."""
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if missing := re.search(r"missing required field `(.+)`", text):
        return refused_field(f"{path}.{missing[1]}".lstrip("."), "is required")
    if unknown := re.search(r"contains unknown field `(.+)`", text):
        return refused_field(f"{path}.{unknown[1]}".lstrip("."), "is not a field that this fleet knows")
    return refused_field(path or None, shorten(text))


def _one_prompt(prompt: str | list[Any]) -> str | list[int]:
    """A text or token ids; a list of one of them is that one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise refused_field("prompt", f"{len(prompt)} prompts in one request are not supported; send one each")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    try:
        ids: list[int] = msgspec.convert(prompt, Annotated[list[TokenId], Meta(min_length=1)])
        return ids
    except msgspec.ValidationError:
        raise refused_field("prompt", "must be a text or a list of one or more token ids") from None


def _generation(fields: CommonFields, *, prompt: Prompt) -> Generation:
    if fields.stream_options is not None and not fields.stream:
        raise refused_field("stream_options", "is only allowed when stream is true")
    return Generation(
        prompt=prompt,
        max_tokens=_max_tokens(fields),
        sampling=_sampling(fields),
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        is_streamed=fields.stream,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
    )


def _max_tokens(fields: CommonFields) -> int | None:
    given = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(given) > 1:
        message = f"{fields.max_completion_tokens} contradicts max_tokens {fields.max_tokens}; send one of them"
        raise refused_field("max_completion_tokens", message)
    return next(iter(given), None)


def _sampling(fields: CommonFields) -> Sampling:
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(fields.top_k, 0),
        min_p=fields.min_p,
        seed=random.getrandbits(64) if fields.seed is None else fields.seed & MASK_64,
    )


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise refused_field("stop", f"{len(strings)} strings are more than {MAX_STOP_STRINGS}")
    if "" in strings:
        raise refused_field("stop", "an empty string would stop before the first token")
    return strings
