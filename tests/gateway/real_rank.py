"""A rank of a real model behind the real wire, in a thread of the test's own process."""

from __future__ import annotations

import threading
from pathlib import Path

from engines import build

from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.sockets import RankSocket

NUM_EXPERTS = 16  # of the shipped model


class RealRank:
    """Steps from the start to `close`; gateways may come and go."""

    def __init__(self, folder: Path) -> None:
        self.secret = FleetSecret.create()
        self.endpoint = ""
        self.engine = build(folder, num_experts=NUM_EXPERTS)
        self._is_bound = threading.Event()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="real-rank")
        self._thread.start()
        assert self._is_bound.wait(10)

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with RankSocket("127.0.0.1", self.secret) as wire:
            self.endpoint = wire.endpoint
            self._is_bound.set()
            self.engine.run(wire, self._is_stopping.is_set)
