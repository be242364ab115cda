"""JSON schemas of what may be asked: the typed fields, and those that are taken as long as they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegahpc.gateway.fields import ChatFields, CompletionFields, Message, StreamOptions
from pegahpc.gateway.no_ops import CHAT_NO_OPS, COMPLETION_NO_OPS, MESSAGE_NO_OPS, STREAM_NO_OPS

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
NO_OPS: Mapping[type[msgspec.Struct], Mapping[str, tuple[object, ...]]] = {
    ChatFields: CHAT_NO_OPS,
    CompletionFields: COMPLETION_NO_OPS,
    Message: MESSAGE_NO_OPS,
    StreamOptions: STREAM_NO_OPS,
}
TAKES_NULLS = (ChatFields, CompletionFields, StreamOptions)  # for fields that may be left out
TOKEN_ID = {"type": "integer", "minimum": 0}
TOKEN_IDS = {"type": "array", "items": TOKEN_ID, "minItems": 1}
# What a struct's types cannot say of a field.
FINER: Mapping[str, Schema] = {
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            TOKEN_IDS,
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            {"type": "array", "items": TOKEN_IDS, "minItems": 1},
        ]
    },
    "logit_bias": {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}},
}


def request_schemas(model: str) -> dict[str, Schema]:
    """Schema by name, of both endpoints' bodies and of what stands in them.

    Args:
        model: the only name that is served.
    """
    _, schemas = msgspec.json.schema_components(list(NO_OPS), ref_template=REF)
    for kind, no_ops in NO_OPS.items():
        schema = schemas[kind.__name__]
        fields = schema["properties"]
        for name in set(fields) - set(schema["required"]):
            fields[name] = _finer(name, fields[name])
            if kind in TAKES_NULLS:
                fields[name] = _or_null(fields[name])
        fields |= {name: {"enum": list(values), "description": "Not honoured."} for name, values in no_ops.items()}
    for name in (ChatFields.__name__, CompletionFields.__name__):
        schemas[name]["properties"]["model"]["enum"] = [model]
    schemas[CompletionFields.__name__]["properties"]["prompt"] = FINER["prompt"]
    return schemas


def _finer(name: str, schema: Schema) -> Schema:
    return schema | FINER.get(name, {})


def _or_null(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    default = {"default": schema.pop("default")} if "default" in schema else {}
    return {"anyOf": [schema, {"type": "null"}], **default}
