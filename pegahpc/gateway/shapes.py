"""The documents of the two endpoints: whole answers, and server-sent events that are encoded but for their text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from pegahpc.gateway.openai import Generation, parse_chat, parse_completion
from pegahpc.gateway.output import Usage

DONE = b"data: [DONE]\n\n"
to_json = msgspec.json.encode


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What tells /v1/chat/completions from /v1/completions.

    Args:
        opening: the choice of a stream's first event; b"" where there is none.
        text_key: the choice's beginning, up to its text; `text_end` closes what it opens.
        last: the fields of the choice that carries the finish reason.
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
)


class Events:
    """The server-sent events of one stream. All but text and finish reason is encoded once.

    Args:
        include_usage: whether a last event carries the usage (and all others say `"usage":null`).
    """

    def __init__(self, shape: Shape, *, request_id: str, model: str, created: int, include_usage: bool) -> None:
        head = {"id": request_id, "object": shape.chunk_object, "created": created, "model": model}
        self._head = b"data: " + to_json(head)[:-1]
        self._choice = self._head + b',"choices":[{"index":0,'
        self._end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._before = self._choice + shape.text_key
        self._after = shape.text_end + b',"logprobs":null,"finish_reason":null' + self._end
        self._shape = shape
        self._include_usage = include_usage

    def opening(self) -> bytes:
        """What comes before any text."""
        shape = self._shape
        if not shape.opening:
            return b""
        return self._choice + shape.opening + b',"logprobs":null,"finish_reason":null' + self._end

    def text(self, text: str) -> bytes:
        """One piece of text; b"" for none."""
        return self._before + to_json(text) + self._after if text else b""

    def closing(self, finish_reason: str, usage: Usage) -> bytes:
        """The finish reason, the usage where it was asked for, and the end mark."""
        last = (
            self._choice + self._shape.last + b',"logprobs":null,"finish_reason":' + to_json(finish_reason) + self._end
        )
        counted = self._head + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n" if self._include_usage else b""
        return last + counted + DONE


def whole(
    shape: Shape, *, request_id: str, model: str, created: int, text: str, finish_reason: str, usage: Usage
) -> bytes:
    """The document of an answer that is not streamed."""
    choice = {"index": 0, **shape.whole_choice(text), "logprobs": None, "finish_reason": finish_reason}
    document = {
        "id": request_id,
        "object": shape.whole_object,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return to_json(document)
