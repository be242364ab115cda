"""Where the processes of a fleet log, and its event log."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


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
