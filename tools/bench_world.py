"""Several measured ranks, each a process of its own (`bench_rank.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

WORKER = Path(__file__).with_name("bench_rank.py")


class World:
    """Used as a context: on leaving, no rank is left."""

    def __init__(self, kind: str, path: Path, world_size: int, **job: Any) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipe = subprocess.PIPE
        self._ranks = [
            subprocess.Popen([sys.executable, WORKER], stdin=pipe, stdout=pipe, text=True, env=env)
            for _ in range(world_size)
        ]
        overrides = [f"topology=ep{world_size}", "cluster.device=cpu"]
        about = {"kind": kind, "path": str(path), "overrides": overrides, **job}
        self.tell([about | {"rank": rank} for rank in range(world_size)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()

    def tell(self, lines: Sequence[Any]) -> None:
        """One line to each rank."""
        for rank, line in zip(self._ranks, lines, strict=True):
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(line) + "\n")
            rank.stdin.flush()

    def hear(self) -> list[Any]:
        """One line of each rank."""
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        return [json.loads(line) for line in lines]

    def introduce(self) -> None:
        """Pass on to all what each said of itself."""
        said = self.hear()
        self.tell([said] * len(self._ranks))


def measure_exchange(path: Path, *, num_bytes: int, repeats: int, rounds: int) -> dict[str, float]:
    """Microseconds, of the slowest of four ranks, best of the rounds."""
    with World("exchange", path, 4, num_bytes=num_bytes, repeats=repeats, rounds=rounds) as world:
        world.introduce()  # fabric
        world.introduce()  # gloo
        figures = world.hear()
    return {name: max(figure[name] for figure in figures) for name in figures[0]}


class EngineWorld(World):
    """Ranks with engines, ready to run."""

    def __init__(self, path: Path, world_size: int) -> None:
        super().__init__("engine", path, world_size)
        if world_size > 1:
            self.introduce()
        assert set(self.hear()) == {"ready"}

    def run(self, requests: Sequence[int], tokens: int) -> float:
        """Seconds until each rank has served its number of requests, so many tokens each."""
        self.tell([{"requests": count, "tokens": tokens} for count in requests])
        return float(max(self.hear()))
