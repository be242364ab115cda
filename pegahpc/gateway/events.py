"""An answer as server-sent events, which are encoded but for their text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pegahpc.gateway.shapes import Answer, Usage
from pegahpc.gateway.text import Shown

DONE = b"data: [DONE]\n\n"
NO_LOGPROBS = b',"logprobs":null'
to_json = msgspec.json.encode


class Events:
    """The events of one choice. All but text, logprobs and finish reason is encoded once."""

    def __init__(self, answer: Answer, index: int) -> None:
        self._answer = answer
        self._shape = shape = answer.shape
        self._choice = _head(answer) + b',"choices":[{"index":%d,' % index
        self._end = b"}]" + (b',"usage":null' if answer.generation.include_usage else b"") + b"}\n\n"
        self._go_on = b',"finish_reason":null' + self._end
        self._before = self._choice + shape.text_key
        self._after = shape.text_end + NO_LOGPROBS + self._go_on

    def opening(self) -> bytes:
        """What comes before any text."""
        opening = self._shape.opening
        return self._choice + opening + NO_LOGPROBS + self._go_on if opening else b""

    def text(self, text: str, shown: Sequence[Shown]) -> bytes:
        """One piece of text with its tokens; b"" for neither."""
        if shown:
            logprobs = b',"logprobs":' + to_json(self._answer.logprobs(shown))
            return self._before + to_json(text) + self._shape.text_end + logprobs + self._go_on
        return self._before + to_json(text) + self._after if text else b""

    def finish(self, finish_reason: str) -> bytes:
        """The choice's last event."""
        return self._choice + self._shape.last + NO_LOGPROBS + b',"finish_reason":' + to_json(finish_reason) + self._end


def closing(answer: Answer, usage: Usage) -> bytes:
    """After the last choice: the usage where it was asked for, and the end mark."""
    if not answer.generation.include_usage:
        return DONE
    return _head(answer) + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n" + DONE


def _head(answer: Answer) -> bytes:
    return b"data: " + to_json(answer.head(answer.shape.chunk_object))[:-1]
