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
        self._num_told = 0  # tokens, in usage
        self._choice = _head(answer) + b',"choices":[{"index":%d,' % index
        self._end = b"}]" + (b',"usage":null' if answer.generation.include_usage else b"") + b"}\n\n"
        self._go_on = b',"finish_reason":null' + self._end
        self._before = self._choice + shape.text_key
        self._after = shape.text_end + NO_LOGPROBS + self._go_on

    def opening(self) -> bytes:
        """What comes before any text."""
        opening = self._shape.opening
        return self._choice + opening + NO_LOGPROBS + self._go_on if opening else b""

    def text(self, text: str, shown: Sequence[Shown], usage: Usage | None = None) -> bytes:
        """One piece of text with its tokens; b"" for neither.

        Args:
            usage: of the choice so far, if it is told in each event: then tokens without text have one as well.
        """
        if usage is None and not shown:
            return self._before + to_json(text) + self._after if text else b""
        if not (text or shown or (usage is not None and usage.completion_tokens > self._num_told)):
            return b""
        logprobs = b',"logprobs":' + to_json(self._answer.logprobs(shown)) if shown else NO_LOGPROBS
        end = b',"finish_reason":null' + self._end_with(usage)
        return self._before + to_json(text) + self._shape.text_end + logprobs + end

    def finish(self, finish_reason: str, usage: Usage | None = None) -> bytes:
        """The choice's last event."""
        reason = NO_LOGPROBS + b',"finish_reason":' + to_json(finish_reason)
        return self._choice + self._shape.last + reason + self._end_with(usage)

    def _end_with(self, usage: Usage | None) -> bytes:
        if usage is None:
            return self._end
        self._num_told = usage.completion_tokens
        return b'}],"usage":' + to_json(usage) + b"}\n\n"


def closing(answer: Answer, usage: Usage) -> bytes:
    """After the last choice: the usage where it was asked for, and the end mark."""
    if not answer.generation.include_usage:
        return DONE
    return _head(answer) + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n" + DONE


def _head(answer: Answer) -> bytes:
    return b"data: " + to_json(answer.head(answer.shape.chunk_object))[:-1]
