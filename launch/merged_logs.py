"""`pegahpc logs`: all logs of a fleet as one stream, each line with who said it."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.2
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]\d{3}")


class Line(NamedTuple):
    """One line; lines without a time of their own (tracebacks) keep that of the line before."""

    stamp: str
    who: str
    text: str


class Tail:
    """One log file that may grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._who = path.stem
        self._offset = 0
        self._stamp = ""
        self._rest = b""

    def read(self) -> list[Line]:
        """The whole lines that came since the last call."""
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [self._line(raw.decode(errors="replace")) for raw in whole]

    def _line(self, text: str) -> Line:
        if found := TIMESTAMP.match(text):
            self._stamp = found.group().replace(" ", "T").replace(",", ".")
        return Line(self._stamp, self._who, text)


def merged(folder: Path, *, last: int | None, is_live: Callable[[], bool] | None = None) -> Iterator[Line]:
    """The lines of all logs in the order of their times.

    Args:
        last: only so many of those that are there; None: all.
        is_live: follow the logs for as long as this says so; None: do not follow.
    """
    tails: dict[Path, Tail] = {}
    lines = _read(folder, tails)
    yield from lines if last is None else lines[len(lines) - min(last, len(lines)) :]
    while is_live is not None and is_live():
        time.sleep(POLL_S)
        yield from _read(folder, tails)


def _read(folder: Path, tails: dict[Path, Tail]) -> list[Line]:
    for path in sorted((folder / "logs").glob("*.log")):
        tails.setdefault(path, Tail(path))
    return list(heapq.merge(*(tail.read() for tail in tails.values()), key=lambda line: line.stamp))
