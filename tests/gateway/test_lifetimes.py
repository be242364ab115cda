"""Beginnings and ends: keys, disconnects, limits, stalls, drains. Nothing is left open after any of them."""

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web

from pegahpc.config import FleetConfig
from pegahpc.gateway.app import drain, make_app
from pegahpc.gateway.appkeys import ENGINES, FLEET
from pegahpc.gateway.rank_link import AttachError
from pegahpc.wire.keys import FleetSecret
from tests.gateway.conftest import Serve, Served
from tests.gateway.fake_engine import updates_for
from tests.gateway.relay import Relay

TEXT = {"model": "tiny-moe", "prompt": "x"}


async def until_empty(app: web.Application) -> None:
    async with asyncio.timeout(5):
        while app[ENGINES].num_open:
            await asyncio.sleep(0.01)


async def test_every_path_but_health_needs_the_key(served: Served) -> None:
    paths = ["/", "/metrics", "/v1/models", "/v1/models/tiny-moe", "/v1/nothing", "/docs", "/health/", "//health"]
    wrong = ["", "Bearer ", "Bearer x", f"Basic {served.key}", served.key, f"Bearer {served.key}x", "Bearer \xe9"]
    async with aiohttp.ClientSession() as stranger:
        for header in wrong:
            headers = {"Authorization": header} if header else {}
            for path in paths:
                async with stranger.get(served.url + path, headers=headers) as response:
                    assert response.status == 401, (path, header)
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
            for path in ("/v1/chat/completions", "/v1/completions", "/health", "/metrics"):
                async with stranger.post(served.url + path, json=TEXT, headers=headers) as response:
                    assert response.status == (405 if path == "/health" else 401)
        async with stranger.get(served.url + "/health") as response:
            assert response.status == 200
    assert served.engine.requests == []


async def test_a_stream_whose_client_leaves_is_aborted_on_its_rank(served: Served) -> None:
    served.engine.is_holding = True
    served.engine.script = lambda request: updates_for(request, [[70], [2]])
    response = await served.http.post(served.url + "/v1/completions", json={**TEXT, "stream": True})
    await response.content.readany()
    request = served.engine.wait_for_request()
    response.close()
    await asyncio.to_thread(served.engine.wait_for_abort, request.id, 1.0)
    await until_empty(served.app)


async def test_a_plain_request_whose_client_leaves_is_aborted_on_its_rank(served: Served) -> None:
    served.engine.is_holding = True
    task = asyncio.create_task(served.complete())
    request = await asyncio.to_thread(served.engine.wait_for_request)
    task.cancel()
    await asyncio.to_thread(served.engine.wait_for_abort, request.id, 1.0)
    await until_empty(served.app)


async def test_a_request_that_ends_is_not_aborted(served: Served) -> None:
    await served.complete()
    await served.complete(stop="never")
    await asyncio.sleep(0.1)
    assert served.engine.aborts == []
    assert served.app[ENGINES].num_open == 0


async def test_one_request_too_many_is_told_to_try_again(serve: Serve) -> None:
    async with serve("gateway.max_concurrent_requests=2") as served:
        served.engine.is_holding = True
        tasks = [asyncio.create_task(served.complete()) for _ in range(2)]
        await asyncio.to_thread(served.engine.wait_for_request, 2)
        async with served.http.post(served.url + "/v1/completions", json=TEXT) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_empty(served.app)
        served.engine.is_holding = False
        assert (await served.complete())[0] == 200


async def test_health_names_the_rank_that_stands_still_and_recovers_with_it(serve: Serve) -> None:
    async with serve("gateway.stall_s=1.0", num_ranks=2) as served:
        async with served.http.get(served.url + "/health") as response:
            assert response.status == 200
        served.engines[1].is_frozen = True
        await asyncio.sleep(1.5)
        async with served.http.get(served.url + "/health") as response:
            body = await response.json()
        assert response.status == 503
        assert [rank["rank"] for rank in body["ranks"]] == [1]
        assert "rank 1" in body["message"]
        for _ in range(3):
            assert (await served.complete())[0] == 200  # rank 0 goes on
        served.engines[1].is_frozen = False
        await asyncio.sleep(0.3)
        async with served.http.get(served.url + "/health") as response:
            assert response.status == 200


async def test_requests_on_a_rank_that_falls_silent_end_within_the_bound(serve: Serve) -> None:
    async with serve("gateway.stall_s=1.0") as served:
        served.engine.is_frozen = True
        started_s = time.monotonic()
        status, body = await served.complete()
        assert (status, body["error"]["code"]) == (500, "engine_failed")
        assert "Rank 0" in body["error"]["message"]
        assert time.monotonic() - started_s < 2.5
        status, body = await served.complete()
        assert (status, body["error"]["code"]) == (503, "engine_stalled")
        assert served.app[ENGINES].num_open == 0


async def test_a_broken_connection_fails_its_requests_at_once_and_is_made_again(serve: Serve) -> None:
    async with serve() as served, Relay(served.engine.endpoint) as relay:
        app = make_app(served.app[FLEET], served.engine.secret, [relay.endpoint])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        served.engine.is_holding = True
        asked = asyncio.create_task(served.complete())
        await asyncio.to_thread(served.engine.wait_for_request)
        await relay.cut()
        async with asyncio.timeout(1):
            status, body = await asked
        assert status == 500
        assert "connection to rank 0 broke" in body["error"]["message"]
        served.engine.is_holding = False
        await asyncio.sleep(0.3)
        assert (await served.complete())[0] == 200
        await runner.cleanup()


async def test_a_rank_that_cannot_be_read_is_down_at_once_and_is_connected_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pegahpc.gateway.engines.RECONNECT_S", (0.4, 5.0))
    async with serve(num_ranks=2) as served:
        served.engines[0].is_holding = True
        asked = asyncio.create_task(served.complete())
        await asyncio.to_thread(served.engines[0].wait_for_request)
        link = served.app[ENGINES].links[0]
        with monkeypatch.context() as broken:
            broken.setattr(link, "on_outputs", lambda _: 1 / 0)
            async with asyncio.timeout(1):
                status, body = await asked
            assert (status, body["error"]["code"]) == (500, "engine_failed")
            assert "rank 0" in body["error"]["message"]
            assert "rank 0: its messages cannot be read; 1 requests fail" in caplog.text
            assert "ZeroDivisionError" in caplog.text
            async with served.http.get(served.url + "/health") as response:
                assert (response.status, (await response.json())["message"]) == (503, "no progress on rank 0")
            assert (await served.complete())[0] == 200  # rank 1 goes on
            assert len(served.engines[0].requests) == 1
        served.engines[0].is_holding = False
        await asyncio.sleep(1.5)
        async with served.http.get(served.url + "/health") as response:
            assert response.status == 200
        assert (await served.complete())[0] == 200
        assert len(served.engines[0].requests) == 2


async def test_a_drain_refuses_new_work_and_lets_running_work_finish(served: Served) -> None:
    served.engine.pause_s = 0.1
    served.engine.script = lambda request: updates_for(request, [[70]] * 5 + [[2]])
    running = asyncio.create_task(served.complete())
    await asyncio.to_thread(served.engine.wait_for_request)
    draining = asyncio.create_task(drain(served.app))
    await asyncio.sleep(0.05)
    async with served.http.post(served.url + "/v1/completions", json=TEXT) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
    assert (await running)[0] == 200
    async with asyncio.timeout(1):
        await draining


async def test_what_a_drain_cuts_off_gets_a_clear_word(serve: Serve) -> None:
    async with serve("fleet.drain_timeout_s=0.3") as served:
        served.engine.is_holding = True
        served.engine.script = lambda request: updates_for(request, [[70], [2]])
        plain = asyncio.create_task(served.complete())
        streamed = await served.http.post(served.url + "/v1/completions", json={**TEXT, "stream": True})
        await asyncio.to_thread(served.engine.wait_for_request, 2)
        async with asyncio.timeout(2):
            await drain(served.app)
        status, body = await plain
        assert status == 500
        assert "shut down" in body["error"]["message"]
        assert "shut down" in (await streamed.text()).strip().split("\n\n")[-1]
        assert served.app[ENGINES].num_open == 0


async def test_setting_up_fails_by_name_when_a_rank_does_not_answer(fleet_of: Callable[..., FleetConfig]) -> None:
    app = make_app(fleet_of("fleet.ready_timeout_s=0.5"), FleetSecret.create(), ["tcp://127.0.0.1:9"])
    runner = web.AppRunner(app)
    with pytest.raises(AttachError, match="no answer from rank 0"):
        await runner.setup()
    await runner.cleanup()


async def test_endpoints_in_the_wrong_order_are_refused(serve: Serve, fleet_of: Callable[..., FleetConfig]) -> None:
    async with serve(num_ranks=2) as served:
        endpoints = [engine.endpoint for engine in reversed(served.engines)]
        secret = served.engine.secret
        runner = web.AppRunner(make_app(fleet_of(), secret, endpoints))
        with pytest.raises(AttachError, match="is answered by rank"):
            await runner.setup()
        await runner.cleanup()
