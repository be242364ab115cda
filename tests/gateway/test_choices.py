"""Several sequences of one request: numbered, seeded, interleaved, ranked, counted, and ended all together."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from pegahpc.gateway.appkeys import ENGINES, GATE
from pegahpc.gateway.planned import choice_seed
from pegahpc.wire.messages import Failed, Request, RequestUpdate
from tests.gateway.conftest import Serve, Served
from tests.gateway.fake_engine import told, updates_for
from tests.gateway.strict_client import chat_chunks_of, chat_of, completion_chunks_of, completion_of, events_of

END = 2
HI = {"role": "user", "content": "hi"}
PAGES = [7] * 33  # two full pages of 16 that a cache may have


async def raw(served: Served, path: str, **fields: object) -> bytes:
    body = {"model": "tiny-moe", **fields}
    async with served.http.post(f"{served.url}/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


def text_of(tokenizer: Tokenizer, *tokens: int) -> str:
    return tokenizer.decode(list(tokens))


def numbered(served: Served, *answers: Sequence[int], **of: Any) -> None:
    """The first request gets the first answer, and so on: one token a step, then the end."""

    def script(request: Request) -> list[RequestUpdate]:
        place = [sent.id for sent in served.engine.requests].index(request.id)
        return updates_for(request, [[token] for token in [*answers[place], END]], **of)

    served.engine.script = script


async def until_empty(served: Served) -> None:
    async with asyncio.timeout(5):
        while served.app[ENGINES].num_open:
            await asyncio.sleep(0.01)


async def test_n_choices_are_numbered_and_the_prompt_is_counted_once(served: Served, tokenizer: Tokenizer) -> None:
    numbered(served, [70], [71, 72], [73], num_cached=1)
    answer = chat_of(await raw(served, "chat/completions", messages=[HI], n=3))
    texts = [text_of(tokenizer, 70), text_of(tokenizer, 71, 72), text_of(tokenizer, 73)]
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(texts))
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    num_prompt_tokens = len(served.engine.requests[0].prompt_tokens)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == num_prompt_tokens
    assert answer.usage.completion_tokens == 2 + 3 + 2
    assert answer.usage.total_tokens == num_prompt_tokens + 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_choices_differ_in_their_seed_alone_and_the_first_has_the_requests_own(served: Served) -> None:
    await served.complete(n=3, seed=7, temperature=0.5)
    await served.complete(seed=7, temperature=0.5)
    await served.complete(n=2, seed=8, temperature=0.5)
    three, one, other = served.engine.requests[:3], served.engine.requests[3], served.engine.requests[4:]
    assert three[0].sampling == one.sampling and one.sampling.seed == 7
    seeds = [request.sampling.seed for request in [*three, *other]]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**64 for seed in seeds)
    assert len({request.id for request in served.engine.requests}) == 6
    assert [request.sampling.temperature for request in three] == [0.5] * 3
    await served.complete(n=3, seed=7, temperature=0.5)
    assert [request.sampling.seed for request in served.engine.requests[-3:]] == seeds[:3]


def test_the_seeds_of_choices_are_a_fixed_function_that_never_repeats() -> None:
    seeds = {choice_seed(seed, choice) for seed in (0, 1, 7, 2**64 - 1) for choice in range(128)}
    assert len(seeds) == 4 * 128
    assert [choice_seed(7, 0), choice_seed(7, 1)] == [7, 1795001697067881697]  # a changed function breaks users' seeds


async def test_choices_without_a_seed_have_different_ones_and_so_have_equal_prompts(served: Served) -> None:
    await served.complete(n=2, prompt=["a", "a"])
    assert len({request.sampling.seed for request in served.engine.requests}) == 4


async def test_a_prompt_of_a_batch_has_the_seeds_that_it_has_alone(served: Served) -> None:
    await served.complete(prompt=["a", "b"], n=2, seed=3)
    await served.complete(prompt="b", n=2, seed=3)
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert seeds[:2] == seeds[2:4] == seeds[4:]


@pytest.mark.parametrize("prompts", [["one", "two"], [[71, 72], [73]]])
async def test_the_choices_of_a_batch_are_numbered_prompt_by_prompt(
    served: Served, tokenizer: Tokenizer, prompts: list[Any]
) -> None:
    numbered(served, [70], [71], [72], [73])
    answer = completion_of(await raw(served, "completions", prompt=prompts, n=2))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [text_of(tokenizer, token) for token in (70, 71, 72, 73)]
    sent = [request.prompt_tokens for request in served.engine.requests]
    ids = [prompt if isinstance(prompt, list) else tokenizer.encode(prompt).ids for prompt in prompts]
    assert sent == [ids[0], ids[0], ids[1], ids[1]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert answer.usage.completion_tokens == 8


async def test_as_many_prompts_as_may_be_are_answered(served: Served) -> None:
    answer = completion_of(await raw(served, "completions", prompt=[[7]] * 128, max_tokens=1))
    assert [choice.index for choice in answer.choices] == list(range(128))


async def test_max_tokens_left_out_is_what_each_prompt_of_a_batch_leaves(served: Served) -> None:
    await served.complete(prompt=[[7] * 500, [7] * 10])
    assert [request.max_tokens for request in served.engine.requests] == [12, 502]


async def test_a_prompt_of_a_batch_that_does_not_fit_is_named(served: Served) -> None:
    status, body = await served.complete(prompt=[[7], [7] * 512])
    assert (status, body["error"]["param"]) == (400, "prompt[1]")
    assert served.engine.requests == []


async def test_choices_are_interleaved_in_one_stream_with_one_end_each(served: Served, tokenizer: Tokenizer) -> None:
    served.engine.num_together, served.engine.pause_s = 3, 0.02
    numbered(served, [70, 71, 72], [80], [90, 91])
    data = await raw(
        served, "chat/completions", messages=[HI], n=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = chat_chunks_of(data)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    answers = [[70, 71, 72], [80], [90, 91]]
    for index, tokens in enumerate(answers):
        own = [choice for choice in choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == text_of(tokenizer, *tokens)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
    pieces = [choice.index for choice in choices if choice.delta.content]
    assert pieces[:3] == [0, 1, 2] and pieces[3:] == [0, 2, 0]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4 + 2 + 3
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_batch_of_completions_is_streamed_by_index(served: Served, tokenizer: Tokenizer) -> None:
    served.engine.num_together = 4
    numbered(served, [70], [71], [72], [73])
    data = await raw(served, "completions", prompt=["a", "b"], n=2, stream=True)
    choices = [choice for chunk in completion_chunks_of(data) for choice in chunk.choices]
    for index, token in enumerate((70, 71, 72, 73)):
        assert "".join(choice.text for choice in choices if choice.index == index) == text_of(tokenizer, token)
    assert sorted(choice.index for choice in choices if choice.finish_reason == "stop") == [0, 1, 2, 3]


async def test_a_choice_that_meets_a_stop_string_is_aborted_and_the_others_go_on(
    served: Served, tokenizer: Tokenizer
) -> None:
    served.engine.num_together = 2
    stop = text_of(tokenizer, 71)

    def script(request: Request) -> list[RequestUpdate]:
        if request.id == served.engine.requests[0].id:
            return updates_for(request, [[70], [71], *[[72]] * 50], "length")[:-1]  # it would never end
        return updates_for(request, [[80]] * 20, "length")

    served.engine.script = script
    answer = completion_of(await raw(served, "completions", prompt="x", n=2, stop=stop))
    assert [choice.text for choice in answer.choices] == [text_of(tokenizer, 70), text_of(tokenizer, *[80] * 20)]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    await asyncio.to_thread(served.engine.wait_for_abort, served.engine.requests[0].id)
    assert served.engine.requests[1].id not in served.engine.aborts


async def test_best_of_gives_the_most_probable_a_token_and_counts_all(served: Served, tokenizer: Tokenizer) -> None:
    logprobs = {70: -1.0, 71: -0.5, 72: -2.0, END: 0.0}  # means with the end: 70: -1/2, 71 71: -1/3, 72: -1
    numbered(served, [70], [71, 71], [72], logprob_of=lambda token: told(token, logprobs[token]))
    answer = completion_of(await raw(served, "completions", prompt="x", n=2, best_of=3))
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [text_of(tokenizer, 71, 71), text_of(tokenizer, 70)]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert [request.logprobs for request in served.engine.requests] == [0, 0, 0]
    assert answer.usage is not None and answer.usage.completion_tokens == 2 + 3 + 2


async def test_best_of_as_many_as_are_wanted_ranks_nothing(served: Served, tokenizer: Tokenizer) -> None:
    numbered(served, [70], [71])
    answer = completion_of(await raw(served, "completions", prompt="x", n=2, best_of=2))
    assert [choice.text for choice in answer.choices] == [text_of(tokenizer, 70), text_of(tokenizer, 71)]
    assert [request.logprobs for request in served.engine.requests] == [None, None]


async def test_best_of_ranks_within_each_prompt(served: Served, tokenizer: Tokenizer) -> None:
    logprobs = {70: -4.0, 71: -3.0, 72: -1.0, 73: -2.0, END: 0.0}
    numbered(served, [70], [71], [72], [73], logprob_of=lambda token: told(token, logprobs[token]))
    answer = completion_of(await raw(served, "completions", prompt=["a", "b"], best_of=2, logprobs=0))
    assert [choice.text for choice in answer.choices] == [text_of(tokenizer, 71), text_of(tokenizer, 72)]
    assert [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs] == [[-3.0], [-1.0]]


async def test_the_first_choice_goes_ahead_until_its_prompt_can_be_shared(served: Served) -> None:
    served.engine.is_holding = True  # a first token, and no end
    served.engine.script = lambda request: updates_for(request, [[70], [END]])
    waits = served.engine.wait_for_request
    task = asyncio.create_task(served.complete(prompt=PAGES, n=3))
    await asyncio.to_thread(waits, 3)
    served.engine.script = lambda request: updates_for(request, [[70]])  # which is held back: not even a token
    silent = asyncio.create_task(served.complete(prompt=PAGES, n=3))
    await asyncio.to_thread(waits, 4)
    await asyncio.sleep(0.2)
    assert len(served.engine.requests) == 4
    short = asyncio.create_task(served.complete(prompt=[7] * 16, n=3))  # no page that could be shared
    await asyncio.to_thread(waits, 7)
    scored = asyncio.create_task(served.complete(prompt=PAGES, n=3, prompt_logprobs=0))  # takes no hit
    await asyncio.to_thread(waits, 10)
    for each in (task, silent, short, scored):
        each.cancel()
    await asyncio.gather(task, silent, short, scored, return_exceptions=True)
    await until_empty(served)


@pytest.mark.parametrize("fields", [{}, {"echo": True, "max_tokens": 0}, {"stream": True}, {"stop": "never"}])
async def test_choices_that_share_pages_all_end(served: Served, fields: dict[str, Any]) -> None:
    steps = [] if fields.get("max_tokens") == 0 else [[70], [71]]
    served.engine.script = lambda request: updates_for(request, steps, "length")
    data = await raw(served, "completions", prompt=[PAGES, PAGES], n=3, **fields)
    if "stream" in fields:
        ends = [choice["index"] for event in events_of(data) for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(ends) == list(range(6))
    else:
        assert [choice.finish_reason for choice in completion_of(data).choices] == ["length"] * 6
    assert len(served.engine.requests) == 6


async def test_choices_go_where_their_prompt_is_cached_while_that_rank_is_not_much_busier(serve: Serve) -> None:
    async with serve("gateway.affinity_load_bound=64", num_ranks=3) as served:
        for engine in served.engines:
            engine.script = lambda request: updates_for(request, [[70], [END]])
        assert (await served.complete(prompt=PAGES, n=8))[0] == 200
        assert sorted(len(engine.requests) for engine in served.engines) == [0, 0, 8]
    async with serve("gateway.affinity_load_bound=0", num_ranks=3) as served:
        for engine in served.engines:
            engine.script = lambda request: updates_for(request, [[70], [END]])
        assert (await served.complete(prompt=PAGES, n=8))[0] == 200
        assert max(len(engine.requests) for engine in served.engines) < 8


def fails_at(served: Served, place: int) -> None:
    def script(request: Request) -> list[RequestUpdate]:
        updates = updates_for(request, [[70], [71], *[[72]] * 20], "length")
        if request.id == served.engine.requests[place].id:
            return [updates[0], RequestUpdate(id=request.id, terminal=Failed("non-finite logits at position 7"))]
        return updates[:-1]  # the others never end by themselves

    served.engine.script = script


@pytest.mark.parametrize("place", [0, 2])
async def test_when_one_choice_fails_all_are_aborted_and_there_is_one_error(served: Served, place: int) -> None:
    served.engine.num_together = 3
    fails_at(served, place)
    status, body = await served.complete(n=3)
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert "position 7" in body["error"]["message"]
    for idx in {0, 1, 2} - {place}:
        await asyncio.to_thread(served.engine.wait_for_abort, served.engine.requests[idx].id)
    await until_empty(served)


async def test_when_one_choice_of_a_stream_fails_its_last_event_is_the_error(served: Served) -> None:
    served.engine.num_together, served.engine.pause_s = 3, 0.05
    fails_at(served, 1)
    data = await raw(served, "completions", prompt="x", n=3, stream=True)
    events = data.decode().strip().split("\n\n")
    assert "position 7" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert not any(event == "data: [DONE]" or '"error"' in event for event in events[:-1])
    for idx in (0, 2):
        await asyncio.to_thread(served.engine.wait_for_abort, served.engine.requests[idx].id)
    await until_empty(served)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("prompt", ["x", PAGES])
async def test_a_client_that_leaves_aborts_all_of_its_choices(
    served: Served, is_streamed: bool, prompt: str | list[int]
) -> None:
    served.engine.is_holding = True
    served.engine.script = lambda request: updates_for(request, [[70], [END]])
    task = asyncio.create_task(raw(served, "completions", prompt=prompt, n=3, stream=is_streamed))
    await asyncio.to_thread(served.engine.wait_for_request, 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for request in served.engine.requests:
        await asyncio.to_thread(served.engine.wait_for_abort, request.id)
    await until_empty(served)
    assert await served.app[GATE].wait_until_empty(1.0)


async def test_each_choice_takes_a_place_of_the_gateway(serve: Serve) -> None:
    async with serve("gateway.max_concurrent_requests=4") as served:
        served.engine.is_holding = True
        task = asyncio.create_task(served.complete(n=3))
        await asyncio.to_thread(served.engine.wait_for_request, 3)
        status, body = await served.complete(n=2)
        assert (status, body["error"]["code"]) == (429, "too_many_requests")
        status, body = await served.complete(prompt=["a", "b", "c", "d", "e"])
        assert (status, body["error"]["param"]) == (400, None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await served.app[GATE].wait_until_empty(5.0)
        served.engine.is_holding = False
        assert (await served.complete(n=4))[0] == 200
