"""Thousands of requests of all kinds, many of whose clients leave: one end each, the same answers, nothing kept.

`pytest tests/fleet/test_soak.py --soak-requests 2000` is the long form.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fleet.live_fleet import LiveFleet
from tests.fleet.metrics import Metrics
from tests.fleet.traffic import Answer, Ask, asks, send
from tests.launch.running_fleet import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_AT_ONCE = 32
MORE_FILES = 8  # a log that was reopened, an idle connection that is not yet closed
MORE_RSS_BYTES = 12 << 20  # allocators keep what they had; a leak of a page table a request would be ten times that


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LiveFleet]:
    """Four ranks with a cache that is small enough to be turned over many times."""
    fleet = LiveFleet(tmp_path, "topology=ep4", "engine.cache_tokens=4096")
    fleet.when_ready()
    yield fleet
    fleet.end()


def test_all_kinds_of_requests_get_one_end_each_and_leave_nothing(
    fleet: LiveFleet, pytestconfig: pytest.Config
) -> None:
    count = int(str(pytestconfig.getoption("soak_requests")))
    url, key = fleet.address()
    assert set(answered(url, key, asks(150, 1, left_share=0.2, impossible_share=0.05))) != {200}  # warms everything up
    until(lambda: is_idle(url, key))
    before, held = Metrics(url, key), {who: Held(pid) for who, pid in fleet.who().items()}

    made = asks(count, 2, left_share=0.2, impossible_share=0.05)
    began_s = time.monotonic()
    answers = asyncio.run(send(url, key, made, num_at_once=NUM_AT_ONCE))
    took_s = time.monotonic() - began_s
    check_ends(made, answers)
    check_likeness(made, answers)
    until(lambda: is_idle(url, key))
    check_counts(made, answers, before, Metrics(url, key))
    time.sleep(1)
    for who, was in held.items():
        was.check(who)
    check_hits(url, key)
    drain(fleet)
    print(f"{count} requests in {took_s:.1f} s: {sum(answer is None for answer in answers)} left")


def answered(url: str, key: str, made: list[Ask]) -> list[int]:
    answers = asyncio.run(send(url, key, made, num_at_once=NUM_AT_ONCE))
    return [answer.status for answer in answers if answer is not None]


def check_ends(made: list[Ask], answers: list[Answer | None]) -> None:
    for ask, answer in zip(made, answers, strict=True):
        if answer is None:
            assert ask.leaves_after is not None
            continue
        assert answer.num_ends == 1, (ask, answer)
        assert answer.status == 200 if ask.subject >= 0 else answer.status in (400, 404), (ask, answer)
        if ask.subject >= 0:
            assert answer.usage["prompt_tokens"] == len(ask.body["prompt"])
            assert 1 <= answer.usage["completion_tokens"] <= ask.body["max_tokens"]


def check_likeness(made: list[Ask], answers: list[Answer | None]) -> None:
    """Whole or streamed, cold or from the cache, alone or in a crowd, on whatever rank."""
    texts: dict[int, set[str]] = {}
    num_compared = 0
    for ask, answer in zip(made, answers, strict=True):
        if answer is not None and ask.subject >= 0:
            num_compared += ask.subject in texts
            texts.setdefault(ask.subject, set()).add(answer.text)
    assert num_compared > len(made) / 4
    assert {subject: said for subject, said in texts.items() if len(said) > 1} == {}


def check_counts(made: list[Ask], answers: list[Answer | None], before: Metrics, after: Metrics) -> None:
    """The gateway saw one end of each request; those whose client left at once may not have reached it."""

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    num_possible = sum(ask.subject >= 0 for ask in made)
    num_left = sum(answer is None for answer in answers)
    ended = "vllm:request_success_total"
    num_done = grown(ended, finished_reason="stop") + grown(ended, finished_reason="length")
    num_aborted = grown(ended, finished_reason="abort")
    assert grown(ended, finished_reason="error") == 0
    assert num_possible - num_left <= num_done <= num_possible
    assert num_possible - num_left <= num_done + num_aborted <= num_possible
    assert 0 < num_aborted <= num_left


def check_hits(url: str, key: str) -> None:
    """Without clients that leave, the counters are to the token what the clients were told."""
    before = Metrics(url, key)
    made = asks(60, 3, left_share=0.0, impossible_share=0.0)
    answers = [answer for answer in asyncio.run(send(url, key, made, num_at_once=8)) if answer is not None]
    after = Metrics(url, key)

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    cached = sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    prompts = sum(len(ask.body["prompt"]) for ask in made)
    assert 0 < cached == grown("vllm:prefix_cache_hits_total")
    assert grown("vllm:prompt_tokens_total") == grown("vllm:prefix_cache_queries_total") == prompts
    by_source = "vllm:prompt_tokens_by_source_total"
    assert grown(by_source, source="cached") == cached and grown(by_source, source="computed") == prompts - cached
    print(f"{cached} of {prompts} prompt tokens cached")


def is_idle(url: str, key: str) -> bool:
    """No page is held or promised on any rank, nothing runs or waits."""
    metrics = Metrics(url, key)
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(metrics.all(name) == [0.0] * 4 for name in names)


def drain(fleet: LiveFleet) -> None:
    """A request that the gateway still held open would hold up the drain."""
    record, began_s = fleet.record(), time.monotonic()
    fleet.launcher.send_signal(signal.SIGTERM)
    assert fleet.launcher.wait(20) == 0
    assert time.monotonic() - began_s < 8
    assert (fleet.record().state, fleet.record().reason) == ("ended", "drained")
    fleet.assert_gone(record.ports(), time.monotonic() + 5)


class Held:
    """What a process holds of the kernel."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._num_files, self._num_threads = self._process.num_fds(), self._process.num_threads()
        self._rss_bytes = self._process.memory_info().rss

    def check(self, who: str) -> None:
        """Whether it holds no more than it did."""
        now = Held(self._process.pid)
        files, threads = now._num_files - self._num_files, now._num_threads - self._num_threads
        rss_mb = (now._rss_bytes - self._rss_bytes) / 1e6
        print(f"{who}: files {files:+d} of {self._num_files}, threads {threads:+d}, memory {rss_mb:+.1f} MB")
        assert files <= MORE_FILES and threads <= 1, who
        assert now._rss_bytes - self._rss_bytes < MORE_RSS_BYTES, who
