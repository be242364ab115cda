"""What Prometheus reads agrees with what was served."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from pegahpc.wire.messages import Failed, Load, RequestUpdate
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
