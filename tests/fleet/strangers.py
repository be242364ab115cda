"""Strangers: they connect to every port that they find and say anything but the right thing."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from contextlib import suppress

GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{",  # and never the rest
    b"\xff" * 5000,
    b"\x00\x00\x00\x05hello",
    b"\x7f\xff\xff\xff" + b"x" * 100,
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 48,  # ZMTP without a key
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
)
NUM_HELD = 100  # connections that stay open, saying nothing more


class Strangers:
    """So many connections a second, over all ports in turn; used as a context."""

    def __init__(self, addresses: list[tuple[str, int]], *, a_second: int) -> None:
        self._addresses, self._a_second = addresses, a_second
        self._is_over = threading.Event()
        self._held: deque[socket.socket] = deque()
        self._thread = threading.Thread(target=self._come)
        self.num_came = 0

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in self._held:
            connection.close()

    def _come(self) -> None:
        draw, began_s = random.Random(1), time.monotonic()
        while not self._is_over.is_set():
            with suppress(OSError):  # refused, or reset while it speaks: what one would expect
                self._visit(draw)
            self.num_came += 1
            self._is_over.wait(max(began_s + self.num_came / self._a_second - time.monotonic(), 0.0))

    def _visit(self, draw: random.Random) -> None:
        connection = socket.socket()
        self._held.append(connection)
        connection.settimeout(1)
        connection.connect(self._addresses[self.num_came % len(self._addresses)])
        connection.sendall(draw.choice(GARBAGE))
        if len(self._held) > NUM_HELD:
            self._held.popleft().close()
