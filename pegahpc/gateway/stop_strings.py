"""Stop strings: text is held back until it cannot be the beginning of one, and shown exactly once."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A filter for one request's text. The result does not depend on how the text is cut.

    The match that is complete first wins: it is where generation ends. Of two that end together, the longer.

    Args:
        shows_match: the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], *, shows_match: bool = False) -> None:
        self._stops = stops
        self._shows_match = shows_match
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        self.has_matched = False

    def feed(self, text: str) -> str:
        """Take the next text, return what may be shown now. After a match, nothing is shown any more."""
        if not self._stops or not text:
            return text
        if self.has_matched:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self.has_matched = True
            self._held = ""
            end, start = min(matches)
            return text[: end if self._shows_match else start]
        num_held = self._num_undecided(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text ended without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
