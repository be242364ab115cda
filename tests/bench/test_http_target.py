"""An endpoint of known timing and known faults: every fault is counted under its name, and nothing else is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pegahpc.bench.drive import Driver, Terms
from pegahpc.bench.figures import figures
from pegahpc.bench.http_target import HttpSettings, HttpTarget
from pegahpc.bench.lengths import parse_lengths
from pegahpc.bench.points import Closed
from pegahpc.bench.prompts import Form, TokenMaterial, WordMaterial
from pegahpc.bench.records import Record
from pegahpc.bench.workload import Workload
from tests.bench.fake_endpoint import ITL_S, MODEL, TTFT_S, Act, FakeEndpoint
from tests.bench.test_workload import spec

NUM_TOKENS = 5
TERMS = Terms(timeout_s=3.0, has_exact_length=True, think_s=0.0, seed=7)
LATE_MS = 40.0  # that a busy machine may add to what the endpoint's clock says


@pytest.fixture
async def fake() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serving() as endpoint:
        yield endpoint


def settings(fake: FakeEndpoint, form: Form = "tokens", **given: Any) -> HttpSettings:
    fields: dict[str, Any] = {"api_key": None, "model": MODEL, "stall_s": 0.3, "extras": {"ignore_eos": True}}
    return HttpSettings(url=fake.url, form=form, **(fields | given))


async def measured(
    fake: FakeEndpoint, how: HttpSettings, *, num_requests: int = 4, concurrency: int = 4, **given: Any
) -> list[Record]:
    asked = spec(num_requests=num_requests, output_tokens=parse_lengths("-t", str(NUM_TOKENS)), **given)
    material = TokenMaterial(300) if how.form == "tokens" else WordMaterial(how.form)
    point = Closed(concurrency)
    batch = Workload(asked, material).batch(point, 0)
    async with HttpTarget(how) as target:
        driver = Driver(target, TERMS, point=point, repeat=0, on_record=lambda record: None)
        return await driver.run(batch)


@pytest.mark.parametrize("form", ["tokens", "text", "chat"])
@pytest.mark.parametrize("has_counts", [False, True])
async def test_known_times_give_the_known_figures(fake: FakeEndpoint, form: Form, has_counts: bool) -> None:
    fake.has_counts = has_counts
    extras = {"continuous_usage_stats": True} if has_counts else {}
    records = await measured(fake, settings(fake, form, stream_extras=extras), num_requests=8, concurrency=2)
    found = figures(records, limits=None, num_devices=None)
    assert (
        found.failures == {} and found.num_uncounted == found.num_bundled == 0 and found.output_tokens == 8 * NUM_TOKENS
    )
    assert found.ttft_ms is not None and found.tpot_ms is not None and found.itl_ms is not None and found.e2e_ms
    assert TTFT_S * 1e3 <= found.ttft_ms.p50 <= TTFT_S * 1e3 + LATE_MS
    assert ITL_S * 1e3 - 2 <= found.tpot_ms.p50 <= ITL_S * 1e3 + LATE_MS / 4
    assert ITL_S * 1e3 - 5 <= found.itl_ms.p50 <= ITL_S * 1e3 + LATE_MS / 4 and found.itl_ms.count == 8 * 4
    whole_ms = (TTFT_S + (NUM_TOKENS - 1) * ITL_S) * 1e3
    assert whole_ms <= found.e2e_ms.p50 <= whole_ms + LATE_MS
    assert found.requests_per_s == pytest.approx(2 / whole_ms * 1e3, rel=0.3)  # two clients at all times


async def test_the_input_is_what_the_server_counted_and_the_body_is_what_was_meant(fake: FakeEndpoint) -> None:
    records = await measured(fake, settings(fake, sends_min_tokens=True))
    assert [record.input_tokens for record in records] == [len(body["prompt"]) for body in fake.bodies]
    assert fake.bodies[0] == {
        "model": MODEL,
        "prompt": fake.bodies[0]["prompt"],
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (Act(status=500), "http_500"),
        (Act(status=429), "http_429"),
        (Act("reset"), "connection_lost"),
        (Act("truncated"), "truncated"),
        (Act("no_done"), "truncated"),
        (Act("no_finish"), "truncated"),
        (Act("odd_finish"), "finish_abort"),
        (Act("stall"), "stalled"),
        (Act("short"), "short_output"),
        (Act("no_usage"), "usage_wrong"),
        (Act("output_overcounted"), "usage_wrong"),
        (Act("output_undercounted"), "usage_wrong"),
        (Act("prompt_miscounted"), "usage_wrong"),
        (Act(cached=10_000), "usage_wrong"),
        (Act("error_event"), "server_error"),
        (Act("garbage"), "malformed"),
        (Act(wait_s=10), "timeout"),
    ],
)
async def test_each_fault_is_counted_by_its_name_and_the_others_still_count(
    fake: FakeEndpoint, act: Act, reason: str
) -> None:
    fake.acts = lambda number: act if number == 1 else Act()
    found = figures(await measured(fake, settings(fake)), limits=None, num_devices=None)
    assert (found.num_succeeded, found.failures) == (3, {reason: 1})
    assert found.output_tokens == 3 * NUM_TOKENS


async def test_where_nobody_listens_every_request_says_so(fake: FakeEndpoint) -> None:
    nowhere = HttpSettings(url="http://127.0.0.1:9/v1", api_key=None, model=MODEL, form="tokens")
    assert {record.failure for record in await measured(fake, nowhere)} == {"not_connected"}


async def test_a_token_without_text_withholds_tpot_unless_the_server_counts(fake: FakeEndpoint) -> None:
    fake.acts = lambda number: Act("textless")
    silent = figures(await measured(fake, settings(fake)), limits=None, num_devices=None)
    assert silent.failures == {} and silent.num_uncounted == 4 and silent.tpot_ms is None
    assert silent.stream_chunk_gap_ms is not None
    fake.has_counts = True
    counting = settings(fake, stream_extras={"continuous_usage_stats": True})
    counted = figures(await measured(fake, counting), limits=None, num_devices=None)
    assert counted.num_uncounted == counted.num_bundled == 0 and counted.tpot_ms is not None


async def test_a_chat_grows_by_its_answers_and_keeps_its_session(fake: FakeEndpoint) -> None:
    records = await measured(fake, settings(fake, "chat"), num_requests=6, num_turns=3, concurrency=1)
    assert [(record.conversation, record.turn) for record in records] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    first, second, third, other = (body["messages"] for body in fake.bodies[:4])
    assert [message["role"] for message in third] == ["user", "assistant", "user", "assistant", "user"]
    assert third[:3] == second and second[:1] == first and len(other) == 1
    assert second[1]["content"] == "w0 w1 w2 w3 w4 "
    assert len(set(fake.sessions[:3])) == 1 and fake.sessions[3] != fake.sessions[0] != ""


async def test_after_a_turn_that_failed_the_rest_of_the_conversation_is_counted_as_failed(fake: FakeEndpoint) -> None:
    fake.acts = lambda number: Act(status=500) if number == 1 else Act()
    records = await measured(fake, settings(fake, "text"), num_requests=3, num_turns=3, concurrency=1)
    assert [record.failure for record in records] == [None, "http_500", "not_sent"]
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_the_closed_loop_keeps_so_many_requests_open(fake: FakeEndpoint, concurrency: int) -> None:
    await measured(fake, settings(fake), num_requests=9, concurrency=concurrency)
    assert fake.most_open == concurrency
