"""One request's answer as it grows: tokens to text, stop strings, the finish reason and the usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pegahpc.gateway.detokenizer import Detokenizer
from pegahpc.gateway.errors import ApiError, engine_failed, from_terminal
from pegahpc.gateway.stop_strings import StopStrings
from pegahpc.wire.messages import Finished, RequestUpdate


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Output:
    """Fed with a stream's updates until it `is_over`; then either `finish_reason` or `failure` is set."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, num_prompt_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self.failure: ApiError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be shown."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def outcome(self) -> str:
        """The word for the metrics: stop, length, error, or abort when it ended before its end."""
        return self.finish_reason or ("error" if self.failure else "abort")

    @property
    def usage(self) -> Usage:
        """What was read and made, the stop token and the tokens of a stop string included."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=self._num_prompt_tokens + self._num_tokens,
            prompt_tokens_details=PromptTokensDetails(self._num_cached_tokens),
        )

    def feed(self, updates: Sequence[RequestUpdate]) -> str:
        """Take updates in order, return the text to show for them."""
        return "".join([self._feed_one(update) for update in updates])

    def _feed_one(self, update: RequestUpdate) -> str:
        self._num_tokens += len(update.tokens)
        if update.cached_tokens is not None:
            self._num_cached_tokens = update.cached_tokens
        if self.is_over:  # after a stop string: counted, not shown
            return ""
        terminal = update.terminal
        is_stopped = isinstance(terminal, Finished) and terminal.reason == "stop"
        shown = self._stops.feed(self._detokenizer.feed(update.tokens[:-1] if is_stopped else update.tokens))
        if terminal is not None and not self._stops.has_matched:
            shown += self._stops.feed(self._detokenizer.finish())
        if self._stops.has_matched:
            self.finish_reason = "stop"
        elif isinstance(terminal, Finished):
            shown += self._stops.flush()
            self._finish(terminal)
        elif terminal is not None:
            self.failure = from_terminal(terminal)
        return shown

    def _finish(self, finished: Finished) -> None:
        """Hold the engine's count against the tokens that came: a hole in the text must not pass for an answer."""
        counted = (finished.prompt_tokens, finished.completion_tokens)
        if counted == (self._num_prompt_tokens, self._num_tokens):
            self.finish_reason = finished.reason
        else:
            self.failure = engine_failed(
                f"The engine counted {counted[0]} + {counted[1]} tokens, the gateway has"
                f" {self._num_prompt_tokens} + {self._num_tokens}: part of the answer was lost."
            )
