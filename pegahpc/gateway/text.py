"""One sequence's tokens as the text that may be shown, with or without the logprobs that belong to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pegahpc.gateway.detokenizer import Detokenizer
from pegahpc.gateway.stop_strings import StopStrings
from pegahpc.wire.messages import TokenLogprob


class Shown(NamedTuple):
    """A token whose text the client has.

    Args:
        offset: where its text begins in the choice's text, in characters.
        logprob: None for a prompt's first token, which nothing comes before.
    """

    token: int
    offset: int
    logprob: TokenLogprob | None


class Text(Protocol):
    """Fed with a sequence's tokens until their end or a stop string."""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string was found; nothing is shown after that."""
        ...

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        """The text that may be shown now."""
        ...

    def finish(self) -> str:
        """No more tokens come: the rest."""
        ...

    def take_shown(self) -> list[Shown]:
        """The tokens whose text was shown since the last call; none where no logprobs are wanted."""
        ...


class PlainText:
    """Tokens go through detokenizer and stop strings as they come, many at once."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenize = detokenizer.feed
        self._finish = detokenizer.finish
        self._stops = stops

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.has_matched

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        """The text that may be shown now."""
        return self._stops.feed(self._detokenize(tokens))

    def finish(self) -> str:
        """An incomplete character, and what was held back."""
        return self._stops.feed(self._finish()) + self._stops.flush()

    def take_shown(self) -> list[Shown]:
        """Nothing is remembered."""
        return []


class TokenText:
    """The same token by token, which knows what text each one has: for logprobs, and for `min_tokens`.

    A token is shown when all of its text is, so that logprobs never tell of text that is held back or cut off.

    Args:
        first_unstoppable: tokens at the beginning whose text stop strings are not looked for in.
        num_echoed: characters that stand before this text.
        has_logprobs: whether `feed` gets one for each token.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        first_unstoppable: int = 0,
        num_echoed: int = 0,
        has_logprobs: bool = True,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_unstoppable = first_unstoppable
        self._has_logprobs = has_logprobs
        self._num_decoded = self._num_shown = num_echoed  # characters
        self._hidden: deque[tuple[int, Shown]] = deque()  # with the length of the text that shows it
        self._shown: list[Shown] = []

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.has_matched

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        """The text that may be shown now."""
        pieces = []
        for idx, token in enumerate(tokens):
            if self.has_stopped:
                break
            pieces.append(self._feed_one(token, logprobs[idx] if self._has_logprobs else None))
        return self._show("".join(pieces))

    def finish(self) -> str:
        """An incomplete character, and what was held back."""
        text = self._show(self._stops.feed(self._detokenizer.finish()) + self._stops.flush())
        if not self.has_stopped:  # all is shown
            self._shown += [shown for _, shown in self._hidden]
        return text

    def take_shown(self) -> list[Shown]:
        """The tokens whose text was shown since the last call."""
        taken, self._shown = self._shown, []
        return taken

    def _feed_one(self, token: int, logprob: TokenLogprob | None) -> str:
        text = self._detokenizer.feed((token,))
        if logprob is not None:
            shown = Shown(token, self._num_decoded, logprob)
            end = self._num_decoded + len(text) + self._detokenizer.is_mid_character
            self._hidden.append((end, shown))
        self._num_decoded += len(text)
        if self._num_unstoppable > 0:
            self._num_unstoppable -= 1
            return text
        return self._stops.feed(text)

    def _show(self, text: str) -> str:
        self._num_shown += len(text)
        while self._hidden and self._hidden[0][0] <= self._num_shown:
            self._shown.append(self._hidden.popleft()[1])
        return text


def echoed(detokenizer: Detokenizer, echo: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Shown]:
    """A prompt's tokens as they stand before the answer; `logprobs` begin at its second token."""
    shown, offset = [], 0
    for token, logprob in zip(tokens, (None, *logprobs), strict=False):  # who counts them is `Output`
        shown.append(Shown(token, min(offset, len(echo)), logprob))
        offset += len(detokenizer.feed((token,)))
    return shown
