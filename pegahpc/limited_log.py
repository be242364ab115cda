"""A log that others cannot fill, whatever they do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0


@dataclass
class _Window:
    began_s: float
    num_lines: int = 0
    num_suppressed: int = 0


class LimitedLog:
    """At most `num_lines` lines a minute of each kind, and one that says how many more there were.

    Kinds are the caller's own words, and few.
    """

    def __init__(self, log: logging.Logger, *, num_lines: int = 5, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._num_lines = num_lines
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def write(self, level: int, kind: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log one line, unless this minute has had enough of its kind."""
        self.end_windows()
        window = self._windows.setdefault(kind, _Window(self._clock()))
        if window.num_lines >= self._num_lines:
            window.num_suppressed += 1
            return
        window.num_lines += 1
        self._log.log(level, message, *args, exc_info=exc_info)

    def end_windows(self) -> None:
        """Say what was suppressed in the minutes that are over. Call it now and then: else the next line does."""
        now_s = self._clock()
        for kind, window in list(self._windows.items()):
            if now_s - window.began_s >= WINDOW_S:
                del self._windows[kind]
                if window.num_suppressed:
                    self._log.warning("%s: suppressed %d", kind, window.num_suppressed)
