"""Server-sent events out of whatever pieces the network makes of them. Source: WHATWG HTML, 9.2 Server-sent events."""

from __future__ import annotations

import re

END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
LINE = re.compile(rb"\r\n|\n|\r")
MAX_EVENT_BYTES = 8 << 20


class EventStream:
    """Fed with bytes, gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of all events that these bytes complete, comments left out.

        Raises:
            ValueError: an event grows beyond all measure.
        """
        *whole, self._buffer = END.split(self._buffer + data)
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [data for event in whole if (data := _data_of(event))]

    @property
    def rest(self) -> bytes:
        """What came after the last complete event; not empty at the end of a stream that was cut."""
        return self._buffer


def _data_of(event: bytes) -> bytes:
    lines = [line for line in LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
