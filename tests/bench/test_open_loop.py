"""The open loop: arrivals do not wait for answers, and a stall is charged to all who would have come meanwhile."""

from __future__ import annotations

import asyncio
import time

from pegahpc.bench.answers import Answer, Ask, Usage
from pegahpc.bench.drive import Driver, Terms
from pegahpc.bench.figures import figures
from pegahpc.bench.lengths import parse_lengths
from pegahpc.bench.points import Closed, Open, Point
from pegahpc.bench.prompts import Form, TokenMaterial
from pegahpc.bench.records import Record
from pegahpc.bench.workload import Workload
from tests.bench.test_workload import spec

NUM_REQUESTS, RATE = 60, 100.0
STALL_S = 0.4
TERMS = Terms(timeout_s=5.0, has_exact_length=True, think_s=0.0, seed=7)


class OneAtATime:
    """Serves one request after the other, each in a moment, but the tenth takes `STALL_S`."""

    form: Form = "tokens"

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self.num_served = 0

    async def ask(self, ask: Ask, answer: Answer) -> None:
        async with self._door:
            self.num_served += 1
            await asyncio.sleep(STALL_S if self.num_served == 10 else 0.001)
            for _ in range(ask.output_tokens):
                answer.on_tokens(1)
            answer.tokens = [3] * ask.output_tokens
        answer.finish_reason = "length"
        answer.usage = Usage(prompt_tokens=len(ask.prompt), completion_tokens=ask.output_tokens, cached_tokens=0)

    async def expert_counts(self) -> None:
        return None


async def measured(point: Point) -> list[Record]:
    asked = spec(num_requests=NUM_REQUESTS, output_tokens=parse_lengths("-t", "2"))
    batch = Workload(asked, TokenMaterial(300)).batch(point, 0)
    driver = Driver(OneAtATime(), TERMS, point=point, repeat=0, on_record=lambda record: None)
    return await driver.run(batch)


async def test_one_stall_shows_in_the_tail_of_the_open_loop_and_hides_in_the_closed() -> None:
    """At 100 arrivals a second some 40 come while the server stalls for 0.4 s, and wait 0.2 s on average."""
    opened = figures(await measured(Open(RATE)), limits=None, num_devices=None)
    closed = figures(await measured(Closed(1)), limits=None, num_devices=None)
    assert opened.ttft_ms is not None and closed.ttft_ms is not None
    assert opened.failures == closed.failures == {}
    assert closed.ttft_ms.p90 < 50  # the one that stalled is one of sixty
    assert opened.ttft_ms.p90 > STALL_S * 1e3 / 2
    assert opened.ttft_ms.p50 > 20


async def test_latency_counts_from_when_a_request_was_due_even_if_the_client_was_late() -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, lambda: _block(0.3))  # the client itself stalls
    records = await measured(Open(RATE))
    late = [record for record in records if record.sent_ms - record.due_ms > 100]
    assert len(late) >= 5
    assert all(record.ttft_ms >= record.sent_ms - record.due_ms for record in records)
    found = figures(records, limits=None, num_devices=None)
    assert found.send_lag_ms is not None and found.send_lag_ms.max > 200


async def test_requests_are_sent_at_their_times() -> None:
    records = await measured(Open(RATE))
    asked = spec(num_requests=NUM_REQUESTS, output_tokens=parse_lengths("-t", "2"))
    due_ms = [each.at_s * 1e3 for each in Workload(asked, TokenMaterial(300)).batch(Open(RATE), 0)]
    assert [record.due_ms for record in records] == [round(at, 3) for at in due_ms]
    assert all(record.sent_ms >= record.due_ms for record in records)


def _block(seconds: float) -> None:
    time.sleep(seconds)
