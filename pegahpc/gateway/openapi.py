"""GET /openapi.json: what this fleet's gateway takes and answers, made of the types that it works with.

**Source** the OpenAPI Specification 3.1.1 (https://spec.openapis.org/oas/v3.1.1).
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import msgspec

from pegahpc.gateway.documents import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    Health,
    ModelCard,
    ModelList,
)
from pegahpc.gateway.fields import ChatFields, CompletionFields
from pegahpc.gateway.request_schemas import REF, Schema, request_schemas

ANSWERS = (ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Error, Health, ModelCard, ModelList)
ERRORS = {
    400: "A field is wrong or not honoured, or the body is none that can be read.",
    401: "No key, or another fleet's.",
    404: "There is no such path or model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is no JSON in UTF-8.",
    417: "There is no such expectation.",
    429: "All places are taken.",
    500: "A rank, or the gateway, failed on this request.",
    503: "The fleet shuts down, has failed, or makes no progress.",
}
OF_EVERY_PATH = (400, 401, 417, 500, 503)
OF_GENERATION = (400, 401, 404, 408, 413, 415, 417, 429, 500, 503)
ERROR_HEADERS = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
STREAM = "One server-sent event. The last one's data is `[DONE]`, or an `Error`."


@functools.cache
def make_document(model: str) -> bytes:
    """The document, as JSON; made once.

    Args:
        model: the only name that is served.
    """
    _, answers = msgspec.json.schema_components(ANSWERS, ref_template=REF)
    document = {
        "openapi": "3.1.1",
        "info": {"title": "pegahpc", "version": version("pegahpc"), "summary": f"The OpenAI API of {model}."},
        "security": [{"key": []}],
        "paths": _paths(model),
        "components": {
            "schemas": request_schemas(model) | answers,
            "headers": {
                "X-Request-Id": {"schema": {"type": "string"}, "description": "The client's own, or a new one."},
                "Retry-After": {"schema": {"type": "string"}, "description": "Seconds."},
                "WWW-Authenticate": {"schema": {"const": "Bearer"}},
            },
            "responses": {str(status): _error(status) for status in ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _paths(model: str) -> dict[str, Any]:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    text = {"type": "string"}
    unwell = _answer("Some rank makes no progress.", {"application/json": _ref(Health)})
    return {
        "/v1/chat/completions": {"post": _generation("chat", ChatFields, ChatCompletion, ChatCompletionChunk)},
        "/v1/completions": {"post": _generation("complete", CompletionFields, Completion, CompletionChunk)},
        "/v1/models": {"get": _get("list_models", "The one model.", {"application/json": _ref(ModelList)})},
        "/v1/models/{model}": {
            "get": {
                **_get("show_model", "One model.", {"application/json": _ref(ModelCard)}, errors=(*OF_EVERY_PATH, 404)),
                "parameters": [name],
            }
        },
        "/health": {
            "get": {
                **_get(
                    "health", "Whether every rank makes progress.", {"application/json": _ref(Health)}, {503: unwell}
                ),
                "security": [],
            }
        },
        "/metrics": {"get": _get("metrics", "For Prometheus.", {"text/plain": text})},
        "/openapi.json": {"get": _get("describe", "This document.", {"application/json": {"type": "object"}})},
    }


def _generation(
    name: str, asked: type[msgspec.Struct], answered: type[msgspec.Struct], chunk: type[msgspec.Struct]
) -> dict[str, Any]:
    kinds = {"application/json": _ref(answered), "text/event-stream": _event(chunk)}
    session = "Requests with the same one stay on one rank, beside what it has cached of them."
    return {
        **_get(name, "An answer, or a stream of its pieces.", kinds, errors=OF_GENERATION),
        "parameters": [
            {"name": "X-Session-Id", "in": "header", "schema": {"type": "string"}, "description": session},
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
    }


def _event(chunk: type[msgspec.Struct]) -> Schema:
    """A stream's schema is, before OpenAPI 3.2, that of each of its events."""
    document = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(chunk), _ref(Error)]}}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", **document}]}
    return {"type": "object", "description": STREAM, "properties": {"data": data}, "required": ["data"]}


def _get(
    name: str,
    what: str,
    kinds: dict[str, Schema],
    others: dict[int, Any] = {},  # noqa: B006 (never changed)
    *,
    errors: tuple[int, ...] = OF_EVERY_PATH,
) -> dict[str, Any]:
    responses = {str(status): {"$ref": f"#/components/responses/{status}"} for status in errors}
    responses |= {"200": _answer(what, kinds)} | {str(status): answer for status, answer in others.items()}
    return {"operationId": name, "summary": what, "responses": dict(sorted(responses.items()))}


def _error(status: int) -> dict[str, Any]:
    answer = _answer(ERRORS[status], {"application/json": _ref(Error)})
    if header := ERROR_HEADERS.get(status):
        answer["headers"] |= {header: {"$ref": f"#/components/headers/{header}"}}
    return answer


def _answer(what: str, kinds: dict[str, Schema]) -> dict[str, Any]:
    return {
        "description": what,
        "headers": {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}},
        "content": {kind: {"schema": schema} for kind, schema in kinds.items()},
    }


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}
