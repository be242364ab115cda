"""A fleet of four ranks as its users see it: what it costs while nobody asks, and how long a first token takes."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

CLI = [sys.executable, "-P", "-m", "pegahpc.launch.cli"]
PREFIX_TOKENS = 400


@dataclass(frozen=True)
class LiveFigures:
    """Medians."""

    idle_share: float  # of one core, all processes of the fleet together
    after_idle_ms: float  # first token of a short prompt
    busy_ms: float  # the same right after another
    cold_ms: float  # first token of 400 tokens that were never seen
    warm_ms: float  # of the same 400 tokens again


class Fleet:
    """A running fleet."""

    def __init__(self, home: str, ready: dict[str, Any]) -> None:
        self._host, self._key = ready["url"].removeprefix("http://").removesuffix("/v1"), ready["api_key"]
        status = json.loads(subprocess.run([*CLI, "status", "--home", home, "--json"], check=True,
                                           capture_output=True).stdout)  # fmt: skip
        pids = [status["launcher"]["pid"], status["gateway"]["pid"]]
        pids += [entry["pid"] for entry in status["trays"] + status["ranks"]]
        self._processes = [psutil.Process(pid) for pid in pids]

    def cpu_s(self) -> float:
        """Seconds of processor that all its processes have used."""
        times = [process.cpu_times() for process in self._processes]
        return sum(time.user + time.system for time in times)

    def first_token_ms(self, prompt: list[int]) -> float:
        """From the request to the first event with text, on a connection of its own."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        body = {"model": "tiny-moe", "prompt": prompt, "max_tokens": 4, "stream": True, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        with closing(http.client.HTTPConnection(self._host, timeout=60)) as connection:
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.readline()
            took_ms = (time.perf_counter() - started) * 1e3
            assert response.read().endswith(b"data: [DONE]\n\n")
        return took_ms


@contextmanager
def running(path: Path) -> Iterator[Fleet]:
    """`pegahpc up --detach topology=ep4`, then `down`."""
    with tempfile.TemporaryDirectory() as home:
        up = [*CLI, "up", "--detach", "--home", home, "--json", f"model.path={path}", "topology=ep4", "gateway.port=0"]
        ready = json.loads(subprocess.run(up, check=True, capture_output=True).stdout)
        try:
            yield Fleet(home, ready)
        finally:
            subprocess.run([*CLI, "down", "--home", home, "--json"], check=True, capture_output=True)


def measure_live(path: Path, *, rounds: int, idle_s: float) -> LiveFigures:
    """Everything on one fleet."""
    with running(path) as fleet:
        fleet.first_token_ms(prompt(0, 8))
        time.sleep(2)
        used_s, began_s = fleet.cpu_s(), time.monotonic()
        time.sleep(idle_s)
        idle_share = (fleet.cpu_s() - used_s) / (time.monotonic() - began_s)
        after_idle, busy, cold, warm = [], [], [], []
        for number in range(rounds):
            time.sleep(5)
            after_idle.append(fleet.first_token_ms(prompt(1 + number, 8)))
            busy.append(fleet.first_token_ms(prompt(50 + number, 8)))
            cold.append(fleet.first_token_ms(prompt(100 + number, PREFIX_TOKENS)))
            warm.append(fleet.first_token_ms(prompt(100 + number, PREFIX_TOKENS)))
    return LiveFigures(idle_share, median(after_idle), median(busy), median(cold), median(warm))


def prompt(number: int, num_tokens: int) -> list[int]:
    """Token ids that no other number begins with."""
    return [1, 6 + number] + [6 + (7 * number + 13 * j) % 3000 for j in range(num_tokens - 2)]
