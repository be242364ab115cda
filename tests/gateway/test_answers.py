"""What a client of the official library gets: whole answers, streams, usage, finish reasons."""

import asyncio
import socket

import aiohttp
import openai
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import Tokenizer

from pegahpc.gateway.appkeys import ENGINES
from tests.gateway.conftest import Serve, Served
from tests.gateway.fake_engine import updates_for

END = 2
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text).ids
    return ids


async def test_a_chat_answer_has_the_text_without_the_stop_token_and_counts_it(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "Good morning, 世界 👋🏽!")
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, END]])
    answer = await served.client.chat.completions.create(model="tiny-moe", messages=HELLO)
    assert answer.choices[0].message.content == "Good morning, 世界 👋🏽!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    prompt = ids_of(tokenizer, "<|bos|><|user|>Hello<|assistant|>")
    assert served.engine.requests[0].prompt_tokens == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.total_tokens == len(prompt) + len(ids) + 1
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"


async def test_a_completion_that_runs_out_of_tokens_says_length_and_shows_its_last_token(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, " there was a fox")
    served.engine.script = lambda request: updates_for(request, [ids[:2], ids[2:]], "length")
    answer = await served.client.completions.create(model="tiny-moe", prompt="Once", max_tokens=len(ids))
    assert answer.choices[0].text == " there was a fox"
    assert answer.choices[0].finish_reason == "length"
    assert served.engine.requests[0].max_tokens == len(ids)
    assert served.engine.requests[0].prompt_tokens == ids_of(tokenizer, "Once")
    assert answer.id.startswith("cmpl-")


async def test_a_chat_stream_has_role_text_finish_usage_and_done_in_that_order(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "é世👍 ok")
    served.engine.pause_s = 0.02
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, END]])
    stream = await served.client.chat.completions.create(
        model="tiny-moe", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "é世👍 ok"
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_a_completion_stream_joins_to_the_whole_text(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one two three")
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, END]])
    stream = await served.client.completions.create(model="tiny-moe", prompt="x", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two three"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"text_completion"}


async def test_the_bytes_of_a_stream_are_events_that_end_with_done(served: Served) -> None:
    body = {"model": "tiny-moe", "prompt": "x", "stream": True}
    async with served.http.post(served.url + "/v1/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        data = await response.read()
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in data.decode()


async def test_the_blocking_client_streams_too(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "plain words")
    served.engine.script = lambda request: updates_for(request, [ids, [END]])

    def talk() -> str:
        with openai.OpenAI(base_url=served.url + "/v1", api_key=served.key, max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny-moe", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(talk) == "plain words"


async def test_an_eos_in_the_middle_is_skipped_in_the_text_with_ignore_eos(
    served: Served, tokenizer: Tokenizer
) -> None:
    left, right = ids_of(tokenizer, "left"), ids_of(tokenizer, " right")
    served.engine.script = lambda request: updates_for(request, [[*left, END], right], "length")
    answer = await served.client.chat.completions.create(
        model="tiny-moe", messages=HELLO, extra_body={"ignore_eos": True, "stop_token_ids": [77]}
    )
    assert answer.choices[0].message.content == "left right"
    assert served.engine.requests[0].stop_token_ids == (77,)


async def test_cached_tokens_are_where_the_official_client_has_them(served: Served) -> None:
    text = "Where is the river? " * 20
    chat = served.client.chat.completions
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
    for num_cached, expected in ((32, 32), (0, 0), (None, 0)):
        served.engine.script = lambda request, num_cached=num_cached: updates_for(  # type: ignore[misc]
            request, [[70], [END]], num_cached=num_cached
        )
        usages = [
            (await chat.create(model="tiny-moe", messages=messages)).usage,
            (await served.client.completions.create(model="tiny-moe", prompt=text)).usage,
        ]
        chunks = await chat.create(
            model="tiny-moe", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        usages.append([chunk.usage async for chunk in chunks][-1])
        pieces = await served.client.completions.create(
            model="tiny-moe", prompt=text, stream=True, stream_options={"include_usage": True}
        )
        usages.append([piece.usage async for piece in pieces][-1])
        for usage in usages:
            assert usage is not None and usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == expected
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_the_engine_stops_at_the_models_eos_and_the_users_tokens(served: Served) -> None:
    await served.chat(stop_token_ids=[77])
    assert served.engine.requests[0].stop_token_ids == (END, 77)


async def test_an_ordinary_token_that_the_user_made_a_stop_is_not_shown(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "keep")
    stop = ids_of(tokenizer, "!")[0]
    served.engine.script = lambda request: updates_for(request, [[*ids, stop]])
    _, body = await served.chat(stop_token_ids=[stop])
    assert body["choices"][0]["message"]["content"] == "keep"
    assert body["usage"]["completion_tokens"] == len(ids) + 1


async def test_max_tokens_left_out_is_the_default_cut_to_the_context(served: Served, tokenizer: Tokenizer) -> None:
    await served.complete(prompt=[7] * 500)
    await served.complete(prompt=[7] * 10)
    assert [request.max_tokens for request in served.engine.requests] == [12, 502]


async def test_requests_without_a_seed_get_different_ones_and_a_seed_is_kept_modulo_two_to_the_64(
    served: Served,
) -> None:
    await served.chat()
    await served.chat()
    await served.chat(seed=-1)
    await served.chat(seed=7)
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [2**64 - 1, 7]


async def test_sampling_fields_reach_the_engine_as_they_were_sent(served: Served) -> None:
    await served.chat(temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125, max_completion_tokens=3, max_tokens=3)
    await served.chat(top_k=40)
    sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 0, 0.125)
    assert served.engine.requests[0].max_tokens == 3
    assert served.engine.requests[1].sampling.top_k == 40


async def test_a_list_of_one_prompt_is_that_prompt_and_text_parts_are_joined(
    served: Served, tokenizer: Tokenizer
) -> None:
    await served.complete(prompt=["hi"])
    await served.complete(prompt=[[5, 6]])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await served.chat(messages=[{"role": "developer", "content": parts}])
    prompts = [request.prompt_tokens for request in served.engine.requests]
    assert prompts == [ids_of(tokenizer, "hi"), [5, 6], ids_of(tokenizer, "<|bos|><|system|>a\nb<|assistant|>")]


async def test_the_model_card_names_the_model_and_its_context(served: Served) -> None:
    listed = await served.client.models.list()
    assert [(card.id, card.model_dump()["max_model_len"]) for card in listed.data] == [("tiny-moe", 512)]
    assert (await served.client.models.retrieve("tiny-moe")).id == "tiny-moe"


async def test_the_request_id_is_the_clients_or_a_new_one(served: Served) -> None:
    for given, is_kept in (("abc-1", True), ("x" * 129, False), ("a b", False)):
        async with served.http.get(served.url + "/v1/models", headers={"X-Request-Id": given}) as response:
            assert (response.headers["X-Request-Id"] == given) is is_kept
    async with served.http.get(served.url + "/health") as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_connections_have_nagles_algorithm_off(served: Served) -> None:
    await served.chat()
    assert served.runner.server is not None
    transports = [handler.transport for handler in served.runner.server.connections]
    sockets = [transport.get_extra_info("socket") for transport in transports if transport is not None]
    assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets] == [1]


async def test_more_than_a_hundred_streams_run_at_once(served: Served) -> None:
    served.engine.is_holding = True
    served.engine.script = lambda request: updates_for(request, [[7], [2]])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=served.http.headers, connector=connector) as http:
        body = {"model": "tiny-moe", "prompt": "x", "stream": True}
        responses = [await http.post(served.url + "/v1/completions", json=body) for _ in range(200)]
        assert served.app[ENGINES].num_open == 200
        for response in responses:
            response.close()
    while served.app[ENGINES].num_open:
        await asyncio.sleep(0.01)


async def test_each_request_goes_to_the_rank_with_the_least_work(serve: Serve) -> None:
    async with serve(num_ranks=3) as served:
        for engine in served.engines:
            engine.is_holding = True
        tasks = [asyncio.create_task(served.complete()) for _ in range(6)]
        await asyncio.to_thread(served.engines[2].wait_for_request, 2)
        assert [len(engine.requests) for engine in served.engines] == [2, 2, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
