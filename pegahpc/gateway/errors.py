"""What can go wrong for a client: one exception, the OpenAI error body, and the table from terminals to statuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, assert_never

import msgspec

from pegahpc.wire.messages import (
    Aborted,
    BadRequest,
    CacheBudget,
    ContextLength,
    Draining,
    Failed,
    Rejected,
    RejectReason,
)

RETRY_AFTER: Final = {"Retry-After": "1"}  # seconds; official clients honour it
HEADERS: Mapping[int, Mapping[str, str]] = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY_AFTER, 503: RETRY_AFTER}
MAX_ECHO_CHARS = 200  # of a client's own words
MAX_MESSAGE_CHARS = 2000  # of anything, a chat template's words included
FLEET_ENDED = "The fleet has ended: one of its processes failed."


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The inside of `{"error": ...}`, as api.openai.com sends it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ApiError(Exception):
    """An answer that is no success: `status` and `body` for the client, nothing internal.

    Args:
        headers: beside those of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {**HEADERS.get(status, {}), **headers}
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = ErrorBody(message=shorten(message, MAX_MESSAGE_CHARS), type=kind, param=param, code=code)

    def encode(self) -> bytes:
        """The JSON document of a response, and of the event that ends a broken stream."""
        return msgspec.json.encode({"error": self.body})


def shorten(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """The text, cut where it is longer: what a client sends does not come back whole."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def refused_field(param: str | None, message: str) -> ApiError:
    """400 for a field that is wrong or that this fleet does not honour; the message starts with its name."""
    param = shorten(param) if param else param
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def context_overflow(*, num_prompt_tokens: int, max_tokens: int | None, limit: int, param: str | None) -> ApiError:
    """400 for a prompt (and its max_tokens, where given) that can never fit the context."""
    asked = "" if max_tokens is None else f" and max_tokens {max_tokens}"
    message = (
        f"This model's maximum context length is {limit} tokens; the prompt has {num_prompt_tokens} tokens{asked}."
        " Shorten the prompt or ask for fewer tokens."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def missing_template(model: str) -> ApiError:
    """400 for a chat with a model that is not made for it."""
    message = f"The model {model!r} has no chat template; use /v1/completions."
    return ApiError(400, message, param="messages", code="no_chat_template")


def draining() -> ApiError:
    """503 while the fleet takes no new work."""
    return ApiError(503, "The fleet is draining and takes no new work.", code="draining")


def fleet_ended() -> ApiError:
    """503 in the last moment of a fleet that failed."""
    return ApiError(503, FLEET_ENDED, code="fleet_ended")


def engine_failed(message: str) -> ApiError:
    """500 for a request that the engine, or the way to it, could not bring to its end."""
    return ApiError(500, message, code="engine_failed")


def from_rejection(reason: RejectReason) -> ApiError:
    """The status and body of each reject reason of the wire."""
    match reason:
        case ContextLength(prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, limit=limit):
            return context_overflow(
                num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, limit=limit, param="max_tokens"
            )
        case CacheBudget(tokens=tokens, limit=limit):
            message = f"The request may need {tokens} tokens of cache and a rank has {limit}; ask for fewer tokens."
            return ApiError(400, message, param="max_tokens", code="cache_budget_exceeded")
        case BadRequest(param=param, message=message):
            return refused_field(param, message)
        case Draining():
            return draining()
        case _:
            assert_never(reason)


def from_terminal(terminal: Rejected | Failed | Aborted) -> ApiError:
    """What a client is told of a request that did not finish."""
    match terminal:
        case Rejected(reason=reason):
            return from_rejection(reason)
        case Failed(message=message):
            return engine_failed(message)
        case Aborted():
            return engine_failed("The engine gave the request up before its end.")
