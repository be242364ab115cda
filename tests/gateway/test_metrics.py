"""What Prometheus reads agrees with what was served."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from pegahpc.wire.messages import ExpertLoads, Failed, LayerExperts, Load, PhaseTimes, RequestUpdate
from tests.gateway.conftest import Serve, Served
from tests.gateway.fake_engine import updates_for

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(served: Served) -> Samples:
    async with served.http.get(served.url + "/metrics") as response:
        text = await response.text()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def key(name: str, engine: str = "0", **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted({"model_name": "tiny-moe", "engine": engine, **labels}.items()))


async def test_requests_tokens_and_latencies_are_counted_once(served: Served) -> None:
    served.engine.script = lambda request: updates_for(request, [[70], [71, 72], [2]])
    served.engine.pause_s = 0.02
    await served.complete(prompt=[5, 6, 7])
    served.engine.script = lambda request: updates_for(request, [[70]], "length")
    await served.complete(prompt=[5, 6], stream=False)
    served.engine.script = lambda request: [RequestUpdate(id=request.id, terminal=Failed("no"))]
    await served.complete()
    await served.post("/v1/nothing-here", {})
    samples = await scrape(served)
    assert samples[key("vllm:prompt_tokens_total")] == 5
    assert samples[key("vllm:generation_tokens_total")] == 5
    assert samples[key("vllm:time_to_first_token_seconds_count")] == 2
    assert samples[key("vllm:inter_token_latency_seconds_count")] == 2
    assert 0.005 < samples[key("vllm:inter_token_latency_seconds_sum")] < 0.5
    assert samples[key("vllm:e2e_request_latency_seconds_count")] == 2
    assert samples[key("vllm:request_queue_time_seconds_sum")] == 1.0
    by_reason = {
        reason: samples[key("vllm:request_success_total", finished_reason=reason)]
        for reason in ("stop", "length", "abort", "error")
    }
    assert by_reason == {"stop": 1, "length": 1, "abort": 0, "error": 1}
    assert samples["http_requests_total", (("handler", "/v1/completions"), ("status", "200"))] == 2
    assert samples["http_requests_total", (("handler", "/v1/completions"), ("status", "500"))] == 1
    assert samples["http_requests_total", (("handler", "unknown"), ("status", "404"))] == 1


async def test_a_client_that_leaves_counts_as_an_abort(served: Served) -> None:
    served.engine.is_holding = True
    task = asyncio.create_task(served.complete())
    request = await asyncio.to_thread(served.engine.wait_for_request)
    task.cancel()
    await asyncio.to_thread(served.engine.wait_for_abort, request.id)
    samples = await scrape(served)
    assert samples[key("vllm:request_success_total", finished_reason="abort")] == 1


async def test_gauges_are_each_ranks_own(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        served.engines[0].load = Load(num_running=3, num_waiting=1, used_pages=5, total_pages=20)
        served.engines[1].load = Load(num_running=0, num_waiting=7, used_pages=20, total_pages=20)
        await asyncio.sleep(0.3)
        samples = await scrape(served)
    assert [samples[key("vllm:num_requests_running", rank)] for rank in "01"] == [3, 0]
    assert [samples[key("vllm:num_requests_waiting", rank)] for rank in "01"] == [1, 7]
    assert [samples[key("vllm:kv_cache_usage_perc", rank)] for rank in "01"] == [0.25, 1.0]


async def test_prompt_tokens_are_counted_by_where_their_rows_came_from(served: Served) -> None:
    for num_tokens, num_cached in ((40, 32), (20, 0), (7, None)):
        served.engine.script = lambda request, num_cached=num_cached: updates_for(  # type: ignore[misc]
            request, [[70], [2]], num_cached=num_cached
        )
        await served.complete(prompt=[5] * num_tokens)
    samples = await scrape(served)
    assert samples[key("vllm:prefix_cache_queries_total")] == 67
    assert samples[key("vllm:prefix_cache_hits_total")] == 32
    assert samples[key("vllm:prompt_tokens_by_source_total", source="cached")] == 32
    assert samples[key("vllm:prompt_tokens_by_source_total", source="computed")] == 35
    assert samples[key("vllm:prompt_tokens_total")] == 67


async def test_a_count_of_cached_tokens_that_cannot_be_does_not_end_the_rank(served: Served) -> None:
    for num_cached in (-1, 99):
        served.engine.script = lambda request, num_cached=num_cached: updates_for(  # type: ignore[misc]
            request, [[2]], num_cached=num_cached
        )
        assert (await served.complete(prompt=[5] * 10))[0] == 200
    samples = await scrape(served)
    assert samples[key("vllm:prompt_tokens_by_source_total", source="cached")] == 10
    assert samples[key("vllm:prompt_tokens_by_source_total", source="computed")] == 10


async def test_experts_are_told_by_layer_and_steps_with_work_once(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        for rank, rows in enumerate(([5, 0], [2, 7])):
            served.engines[rank].experts = ExpertLoads(
                num_steps=3 + rank, first_expert=2 * rank, layers=[LayerExperts(1, rows, 4 + rank)]
            )
        await asyncio.sleep(0.4)
        samples = await scrape(served)
    want = {("0", "0"): 5, ("0", "1"): 0, ("1", "2"): 2, ("1", "3"): 7}
    for (engine, expert), num_rows in want.items():
        assert samples[key("pegahpc:expert_rows_total", engine, layer="1", expert=expert)] == num_rows
    assert [samples[key("pegahpc:experts_seen_total", engine, layer="1")] for engine in "01"] == [4, 5]
    assert samples["pegahpc:moe_steps_total", (("layer", "1"),)] == 4  # the newest that any rank told


async def test_steps_and_phases_are_the_ranks_own_totals(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        before = await scrape(served)
        served.engines[1].phases = PhaseTimes(
            schedule_s=1, forward_s=20, exchange_s=5, sample_s=2, publish_s=3, idle_s=9
        )
        await asyncio.sleep(0.4)
        samples = await scrape(served)
        num_steps = served.engines[1].step
    phases = {"schedule": 1, "forward": 20, "exchange": 5, "sample": 2, "publish": 3, "idle": 9}
    name = "pegahpc:step_phase_seconds_total"
    assert {phase: samples[key(name, "1", phase=phase)] for phase in phases} == phases
    assert {samples[key(name, "0", phase=phase)] for phase in phases} == {0}
    steps = key("pegahpc:steps_total", "1")
    assert 1 <= before[steps] < samples[steps] <= num_steps
