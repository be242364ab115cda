"""Requests find the rank that has their prefix or their conversation: fake ranks tell their pages over the wire."""

import asyncio
import struct
from collections.abc import Callable
from hashlib import blake2b

from aiohttp import web

from pegahpc.gateway.app import make_app
from pegahpc.gateway.appkeys import FLEET
from pegahpc.wire.messages import Load
from tests.gateway.conftest import TINY, Serve, Served
from tests.gateway.fake_engine import FakeEngine, updates_for
from tests.gateway.relay import Relay
from tests.gateway.test_metrics import key, scrape

PAGE = 16
PROMPT = [3 + idx % 200 for idx in range(4 * PAGE)]
BUSY = Load(num_running=9, num_waiting=0, used_pages=0, total_pages=100)


def names_of(tokens: list[int]) -> list[bytes]:
    """The chain as protocols.md writes it, without the function that engines and gateway share."""
    config = blake2b((TINY / "config.json").read_bytes(), digest_size=16)
    for file in sorted(TINY.glob("*.safetensors")):
        config.update(f"{file.name}:{file.stat().st_size};".encode())
    names = [blake2b(config.digest(), digest_size=16).digest()]
    for first in range(0, len(tokens) // PAGE * PAGE, PAGE):
        page = struct.pack(f"<{PAGE}I", *tokens[first : first + PAGE])
        names.append(blake2b(names[-1] + page, digest_size=16).digest())
    return names[1:]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.01)


async def until_known(served: Served, *num_pages: int) -> None:
    async with asyncio.timeout(5):
        while True:
            samples = await scrape(served)
            if [samples[key("pegahpc:prefix_pages", str(rank))] for rank in range(len(num_pages))] == list(num_pages):
                return
            await asyncio.sleep(0.02)


async def until_loaded(served: Served, rank: int, load: Load) -> None:
    served.engines[rank].load = load
    async with asyncio.timeout(5):
        while (await scrape(served))[key("vllm:num_requests_running", str(rank))] != load.num_running:
            await asyncio.sleep(0.02)


async def rank_of(served: Served, prompt: list[int], session: str = "") -> int:
    """The rank that gets this prompt, alone in the fleet."""
    before = [len(engine.requests) for engine in served.engines]
    status, body = await served.complete_in(session, prompt)
    assert status == 200, body
    (rank,) = [rank for rank, engine in enumerate(served.engines) if len(engine.requests) > before[rank]]
    await asyncio.sleep(0.3)  # the ranks' next heartbeat: what was sent is no longer counted on top
    return rank


async def test_a_prompt_goes_to_the_rank_that_has_most_of_it(serve: Serve) -> None:
    async with serve(num_ranks=3) as served:
        assert await rank_of(served, PROMPT) == 0
        names = names_of(PROMPT)
        served.engines[1].change_cache(stored=names[:1])
        served.engines[2].change_cache(stored=names[:3])
        await until_known(served, 0, 1, 3)
        assert await rank_of(served, PROMPT) == 2
        assert await rank_of(served, [*PROMPT[: 2 * PAGE], 7, *PROMPT[2 * PAGE :]]) == 2
        assert await rank_of(served, [7, *PROMPT]) == 0  # the same words one token later are other pages
        served.engines[2].change_cache(removed=names[:1])
        await until_known(served, 0, 1, 2)
        assert await rank_of(served, PROMPT) == 1


async def test_a_page_that_ends_with_the_prompt_is_no_hit_since_its_last_token_is_computed(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        served.engines[1].change_cache(stored=names_of(PROMPT))
        await until_known(served, 0, 4)
        assert await rank_of(served, PROMPT[:PAGE]) == 0
        assert await rank_of(served, [*PROMPT[:PAGE], 9]) == 1
        assert await rank_of(served, PROMPT[:1]) == 0


async def test_chats_with_one_system_prompt_share_a_rank(serve: Serve) -> None:
    system = {"role": "system", "content": "You are a patient teacher of geography who answers in short words."}
    async with serve(num_ranks=2) as served:
        await served.chat(messages=[system, {"role": "user", "content": "Where is Peru?"}])
        served.engines[1].change_cache(stored=names_of(served.engines[0].requests[0].prompt_tokens)[:1])
        await until_known(served, 0, 1)
        await asyncio.sleep(0.3)
        await served.chat(messages=[system, {"role": "user", "content": "Why is it green?"}])
        assert len(served.engines[1].requests) == 1


async def test_a_hot_prefix_yields_to_load_beyond_the_bound(serve: Serve) -> None:
    async with serve("gateway.affinity_load_bound=9", num_ranks=2) as served:
        served.engines[1].change_cache(stored=names_of(PROMPT))
        await until_known(served, 0, 4)
        await until_loaded(served, 1, BUSY)
        assert await rank_of(served, PROMPT) == 1
        await until_loaded(served, 1, Load(num_running=10, num_waiting=0, used_pages=0, total_pages=100))
        assert await rank_of(served, PROMPT) == 0


async def test_a_session_sticks_to_its_rank_before_any_prefix_and_yields_to_load(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        await until_loaded(served, 0, BUSY)
        assert await rank_of(served, PROMPT, "chat-1") == 1
        await until_loaded(served, 0, Load(num_running=0, num_waiting=0, used_pages=0, total_pages=100))
        served.engines[0].change_cache(stored=names_of(PROMPT))
        await until_known(served, 4, 0)
        assert await rank_of(served, PROMPT, "chat-1") == 1
        assert await rank_of(served, PROMPT, "chat-2") == 0
        assert await rank_of(served, PROMPT) == 0
        await until_loaded(served, 1, BUSY)
        assert await rank_of(served, PROMPT, "chat-1") == 0
        await until_loaded(served, 1, Load(num_running=0, num_waiting=0, used_pages=0, total_pages=100))
        assert await rank_of(served, [5], "chat-1") == 0  # it moved, and stays


async def test_a_session_leaves_a_rank_that_falls_silent(serve: Serve) -> None:
    async with serve("gateway.stall_s=1.0", num_ranks=2) as served:
        await until_loaded(served, 0, BUSY)
        assert await rank_of(served, [5], "a") == 1
        served.engines[1].is_frozen = True
        await asyncio.sleep(1.3)
        assert await rank_of(served, [5], "a") == 0


async def test_a_burst_with_one_new_prefix_goes_to_as_few_ranks_as_the_load_bound_allows(serve: Serve) -> None:
    async with serve(num_ranks=8) as served:
        await until_known(served, *[0] * 8)
        for engine in served.engines:
            engine.is_frozen = True  # nobody answers, nobody reports: the whole burst is on its way at once
        burst = [asyncio.create_task(served.complete(prompt=[*PROMPT, 3 + idx])) for idx in range(16)]
        await until(lambda: sum(len(engine.requests) for engine in served.engines) == 16)
        # each counts 4, and the bound is 8: three go to a rank before the next one has its turn
        assert [len(engine.requests) for engine in served.engines] == [3, 3, 3, 3, 3, 1, 0, 0]
        samples = await scrape(served)
        reasons = {
            reason: sum(samples[key("pegahpc:routing_decisions_total", str(rank), reason=reason)] for rank in range(8))
            for reason in ("prefix", "load")
        }
        assert reasons == {"prefix": 10, "load": 6}
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)


async def test_what_a_client_that_left_would_have_stored_is_nowhere(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        await until_loaded(served, 1, Load(num_running=1, num_waiting=0, used_pages=0, total_pages=100))
        served.engine.is_holding = True
        asked = asyncio.create_task(served.complete(prompt=PROMPT))
        await asyncio.to_thread(served.engine.wait_for_request)
        served.engine.is_holding = False  # this one is never answered, the next ones are
        await until_loaded(served, 0, Load(num_running=2, num_waiting=0, used_pages=0, total_pages=100))
        assert await rank_of(served, [*PROMPT, 4]) == 0
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.to_thread(served.engine.wait_for_abort, served.engine.requests[0].id)
        assert await rank_of(served, [*PROMPT, 5]) == 1


async def test_where_pages_are_is_not_asked_without_a_prefix_cache_or_with_one_rank(serve: Serve) -> None:
    for overrides, num_ranks in ((["engine.prefix_cache=false"], 2), ([], 1)):
        async with serve(*overrides, num_ranks=num_ranks) as served:
            served.engines[-1].change_cache(stored=names_of(PROMPT))
            await until_known(served, *[0] * (num_ranks - 1), 4)
            assert await rank_of(served, PROMPT) == 0
            samples = await scrape(served)
            assert samples[key("pegahpc:routing_decisions_total", "0", reason="load")] == 1


async def test_every_decision_is_counted_by_its_reason(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        served.engines[1].change_cache(stored=names_of(PROMPT))
        await until_known(served, 0, 4)
        for prompt, session in (([5], ""), (PROMPT, "a"), ([5], "a"), (PROMPT, "")):
            await rank_of(served, prompt, session)
        samples = await scrape(served)
    decided = {
        (rank, reason): samples[key("pegahpc:routing_decisions_total", rank, reason=reason)]
        for rank in "01"
        for reason in ("session", "prefix", "load")
    }
    assert {kind: count for kind, count in decided.items() if count} == {
        ("0", "load"): 1, ("1", "prefix"): 2, ("1", "session"): 1,
    }  # fmt: skip


async def test_pages_that_a_rank_had_before_the_gateway_came_are_in_its_snapshot(serve: Serve) -> None:
    async with serve(num_ranks=2) as first:
        first.engines[1].pages = names_of(PROMPT)
        runner = web.AppRunner(
            make_app(first.app[FLEET], first.engine.secret, [engine.endpoint for engine in first.engines])
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        first.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await until_known(first, 0, 4)
        assert await rank_of(first, PROMPT) == 1
        await runner.cleanup()


async def test_a_broken_connection_forgets_pages_and_sessions_until_the_next_snapshot(serve: Serve) -> None:
    async with serve(num_ranks=2) as served, Relay(served.engines[1].endpoint) as relay:
        far: FakeEngine = served.engines[1]
        far.pages = names_of(PROMPT)
        app = make_app(served.app[FLEET], served.engine.secret, [served.engine.endpoint, relay.endpoint])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await until_known(served, 0, 4)
        assert await rank_of(served, PROMPT, "a") == 1

        far.says_snapshot = False
        await relay.cut()
        await until_known(served, 0, 0)
        await asyncio.sleep(0.5)  # attached again by now
        far.change_cache(stored=[b"x" * 16])
        assert await rank_of(served, PROMPT, "a") == 0
        await until_known(served, 0, 0)  # a change without the whole is no knowledge

        far.says_snapshot, far.pages = True, names_of(PROMPT)[:2]
        await relay.cut()
        await until_known(served, 0, 2)
        assert await rank_of(served, PROMPT) == 1
        await runner.cleanup()


async def test_the_fleet_serves_on_while_names_come_and_go_under_load(serve: Serve) -> None:
    async with serve(num_ranks=2) as served:
        names = names_of(PROMPT)
        served.engine.script = lambda request: updates_for(request, [[70], [2]])
        for _ in range(10):
            served.engine.change_cache(stored=names)
            served.engine.change_cache(removed=names)
            answers = await asyncio.gather(*[served.complete(prompt=PROMPT) for _ in range(8)])
            assert [status for status, _ in answers] == [200] * 8
        await until_known(served, 0, 0)
