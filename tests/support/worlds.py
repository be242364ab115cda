"""Several ranks of one fleet, each a process of its own, running to the agreed stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("rank_worker.py")
Asked = tuple[str, list[int], int, dict[str, Any]]  # id, prompt, max_tokens, sampling


@dataclass(frozen=True)
class RankResult:
    """What one rank did."""

    tokens: dict[str, list[int]]
    steps: int
    exchanges: int
    seconds: float  # from the first step to the agreed stop
    logits: list[str]  # digests of the first sampled row's logits, a step each


def run_world(
    folder: Path,
    requests_by_rank: list[list[Asked]],
    *overrides: str,
    num_experts: int,
    hidden: int,
    dispatcher: str = "torch",
) -> list[RankResult]:
    """Start one process a rank, give each its requests, and wait until all have left together."""
    world_size = len(requests_by_rank)
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(WORKER.parent)}
    ranks = [
        subprocess.Popen([sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(world_size)
    ]
    try:
        for rank, process in enumerate(ranks):
            job = {"rank": rank, "world_size": world_size, "folder": str(folder), "num_experts": num_experts,
                   "overrides": list(overrides), "dispatcher": dispatcher, "hidden": hidden,
                   "requests": requests_by_rank[rank]}  # fmt: skip
            _say(process, json.dumps(job))
        said = [json.loads(_hear(process)) for process in ranks]
        for process in ranks:
            _say(process, json.dumps(said))
        answers = [process.communicate(timeout=100)[0] for process in ranks]
        return [RankResult(**json.loads(answer)) for answer in answers]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.rstrip("\n") + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
