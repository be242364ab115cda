"""Warnings that strangers can cause at will must not fill a disk."""

from __future__ import annotations

import logging
import time


class RareWarning:
    """Warnings of a kind that others can cause at will: a few in a while, then one line with how many were left out.

    Args:
        most: lines in `every_s`.
    """

    def __init__(self, logger: logging.Logger, *, most: int = 10, every_s: float = 10.0) -> None:
        self._logger, self._most, self._every_s = logger, most, every_s
        self._since_s, self._count = 0.0, 0

    def __call__(self, message: str, *arguments: object) -> None:
        """Log, or only count."""
        now_s = time.monotonic()
        if now_s - self._since_s > self._every_s:
            if self._count > self._most:
                self._logger.warning("%d more like the last one were not logged", self._count - self._most)
            self._since_s, self._count = now_s, 0
        self._count += 1
        if self._count <= self._most:
            self._logger.warning(message, *arguments)
