"""One sequence's answer as it grows: its text, the logprobs to show, how it ended, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pegahpc.gateway.detokenizer import Detokenizer
from pegahpc.gateway.errors import ApiError, engine_failed, from_terminal
from pegahpc.gateway.openai import Generation
from pegahpc.gateway.planned import Planned, Prompt
from pegahpc.gateway.stop_strings import StopStrings
from pegahpc.gateway.text import PlainText, Shown, Text, TokenText, echoed
from pegahpc.wire.messages import Finished, RequestUpdate, TokenLogprob


class Output:
    """Fed with a stream's updates until it `is_over`; then either `finish_reason` or `failure` is set."""

    def __init__(self, generation: Generation, planned: Planned, new_detokenizer: Callable[[], Detokenizer]) -> None:
        sent = planned.request
        self._text = _text(generation, planned, new_detokenizer())
        self._prompt = planned.prompt if generation.is_echoed else None  # until it is echoed
        self._untold: Prompt | None = None  # echoed, and its tokens not taken yet
        self._new_detokenizer = new_detokenizer
        self._shows_logprobs = generation.logprobs is not None
        self._includes_stop = generation.includes_stop
        self._has_logprobs = sent.logprobs is not None
        self._num_prompt_logprobs = 0 if sent.prompt_logprobs is None else len(sent.prompt_tokens) - 1
        self._sum_logprobs = 0.0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.num_prompt_tokens = len(sent.prompt_tokens)
        self.num_cached_tokens = 0
        self.num_tokens = 0  # made, the stop token and the tokens of a stop string included
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
    def mean_logprob(self) -> float:
        """Of all tokens that were made; 0 for none."""
        return self._sum_logprobs / max(self.num_tokens, 1)

    def take_shown(self) -> list[Shown]:
        """The tokens, with their logprobs, whose text `feed` has given since the last call; none unless asked for."""
        if not self._shows_logprobs:
            return []
        shown = self._text.take_shown()
        if self._untold is not None:
            prompt, self._untold = self._untold, None
            shown = echoed(self._new_detokenizer(), prompt.echo, prompt.tokens, self.prompt_logprobs) + shown
        return shown

    def feed(self, updates: Sequence[RequestUpdate]) -> str:
        """Take updates in order, return the text to show for them."""
        if len(updates) == 1:  # nearly always
            return self._feed_one(updates[0])
        return "".join([self._feed_one(update) for update in updates])

    def _feed_one(self, update: RequestUpdate) -> str:
        tokens, terminal = update.tokens, update.terminal
        self.num_tokens += len(tokens)
        if update.cached_tokens is not None:
            self.num_cached_tokens = update.cached_tokens
        if self._has_logprobs or self._num_prompt_logprobs:
            self._take_logprobs(update)
        if self.finish_reason is not None or self.failure is not None:  # after a stop string: counted, not shown
            return ""
        if isinstance(terminal, Finished) and terminal.reason == "stop" and not self._includes_stop:
            tokens = tokens[:-1]
        shown = self._text.feed(tokens, update.logprobs)
        if self._prompt is not None and (update.tokens or terminal is not None):
            shown = self._echo(self._prompt) + shown
        if terminal is not None:
            shown += self._text.finish()
        if self._text.has_stopped:
            self.finish_reason = "stop"
        elif isinstance(terminal, Finished):
            self._finish(terminal)
        elif terminal is not None:
            self.failure = from_terminal(terminal)
        return shown

    def _echo(self, prompt: Prompt) -> str:
        """What stands before the first token: by then, all of the prompt's logprobs have come."""
        self._prompt, self._untold = None, prompt
        return prompt.echo

    def _take_logprobs(self, update: RequestUpdate) -> None:
        self.prompt_logprobs += update.prompt_logprobs
        self._sum_logprobs += sum(of.logprob for of in update.logprobs)
        if self._has_logprobs and len(update.logprobs) != len(update.tokens):
            self.failure = engine_failed(
                f"The engine gave {len(update.logprobs)} logprobs of {len(update.tokens)} tokens."
            )

    def _finish(self, finished: Finished) -> None:
        """Hold the engine's count against the tokens that came: a hole in the text must not pass for an answer."""
        counted = (finished.prompt_tokens, finished.completion_tokens)
        if counted != (self.num_prompt_tokens, self.num_tokens):
            self.failure = engine_failed(
                f"The engine counted {counted[0]} + {counted[1]} tokens, the gateway has"
                f" {self.num_prompt_tokens} + {self.num_tokens}: part of the answer was lost."
            )
        elif len(self.prompt_logprobs) != self._num_prompt_logprobs:
            self.failure = engine_failed(
                f"The engine gave {len(self.prompt_logprobs)} logprobs of {self.num_prompt_tokens} prompt tokens."
            )
        else:
            self.finish_reason = finished.reason


def _text(generation: Generation, planned: Planned, detokenizer: Detokenizer) -> Text:
    """The plain one where nobody asks which token a piece of text comes from."""
    stops = StopStrings(generation.stop, shows_match=generation.includes_stop)
    has_logprobs = generation.logprobs is not None
    if not has_logprobs and not (generation.stop and generation.min_tokens):
        return PlainText(detokenizer, stops)
    return TokenText(
        detokenizer,
        stops,
        first_unstoppable=generation.min_tokens,
        num_echoed=len(planned.prompt.echo),
        has_logprobs=has_logprobs,
    )
