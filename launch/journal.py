"""Where the processes of a fleet log, and its event log."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


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


def log_path(folder: Path, who: str) -> Path:
    """Where a process of the fleet logs: `rank 3` -> logs/rank-3.log."""
    return folder / "logs" / f"{who.replace(' ', '-')}.log"


def add_event(folder: Path, event: str, **facts: object) -> None:
    """Append one JSON line to events.jsonl; lines are short, so appends of several processes do not mix.

    A fleet goes on when its file system does not.
    """
    line = msgspec.json.encode({"time": round(time.time(), 3), "event": event} | facts)
    try:
        with open(folder / "events.jsonl", "ab") as file:
            file.write(line + b"\n")
    except OSError as error:
        log.warning("fleet.home: an event cannot be written (%s): %s", error, line.decode())
