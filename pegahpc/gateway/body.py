"""From a request's bytes to the typed fields of its endpoint, or a refusal that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from pegahpc.gateway.errors import ApiError, refused_field, shorten
from pegahpc.gateway.fields import ChatFields, CommonFields, StreamOptions
from pegahpc.gateway.no_ops import CHAT_NO_OPS, COMPLETION_NO_OPS, MESSAGE_NO_OPS, STREAM_NO_OPS, without_no_ops

Fields = TypeVar("Fields", bound=CommonFields)


def read_fields(body: bytes, kind: type[Fields], model: str) -> Fields:
    """Check each field of a body by itself.

    Raises:
        ApiError: 400 naming the field, or 404 for a model that is not `model`.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    try:
        fields = msgspec.convert(_asked_for(document, kind), kind, str_keys=True)  # keys of logit_bias are token ids
    except msgspec.ValidationError as error:
        raise _named(error) from None
    if fields.model != model:
        message = f"The model {shorten(fields.model)!r} does not exist; this fleet serves {model!r}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return fields


def _asked_for(document: dict[str, Any], kind: type[CommonFields]) -> dict[str, Any]:
    """The document without what asks for nothing: null for an optional field, and no-ops at their value."""
    no_ops = CHAT_NO_OPS if kind is ChatFields else COMPLETION_NO_OPS
    asked = without_no_ops(_without_nulls(document, kind), no_ops, where="")
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
    text, _, path = str(error).partition(" - at ")
    text += " as a key" if path.startswith("`key`") else ""
    path = path.removeprefix("`key` in ").strip("`").removeprefix("$").removesuffix("[...]").lstrip(".")
    if missing := re.search(r"missing required field `(.+)`", text):
        return refused_field(f"{path}.{missing[1]}".lstrip("."), "is required")
    if unknown := re.search(r"contains unknown field `(.+)`", text):
        return refused_field(f"{path}.{unknown[1]}".lstrip("."), "is not a field that this fleet knows")
    return refused_field(path or None, shorten(text))
