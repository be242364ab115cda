"""Logprobs in the shapes of both endpoints, and never of text that is not shown."""

import math
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer

from pegahpc.gateway.appkeys import MODEL
from pegahpc.wire.messages import Request, RequestUpdate
from tests.gateway.conftest import Served
from tests.gateway.fake_engine import told, updates_for
from tests.gateway.strict_client import chat_of, completion_chunks_of, completion_of

END = 2
HI = {"role": "user", "content": "hi"}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def says(served: Served, *steps: list[int], reason: str = "stop", **of: Any) -> None:
    served.engine.script = lambda request: updates_for(request, steps, reason, **of)


async def raw(served: Served, path: str, **fields: object) -> bytes:
    body = {"model": "tiny-moe", **fields}
    async with served.http.post(f"{served.url}/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def test_a_chat_has_each_tokens_text_bytes_and_the_best_ones(served: Served, tokenizer: Tokenizer) -> None:
    fox, dog = ids_of(tokenizer, " fox")[0], ids_of(tokenizer, " dog")[0]
    says(served, [fox], [END], logprob_of=lambda token: told(token, -1.5, 2, [(dog, -0.5), (fox, -1.5), (END, -2.25)]))
    answer = chat_of(await raw(served, "chat/completions", messages=[HI], logprobs=True, top_logprobs=3))
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.refusal is None
    assert choice.logprobs.content is not None
    (entry,) = choice.logprobs.content
    text = tokenizer.decode([fox])
    assert (entry.token, entry.logprob, entry.bytes) == (text, -1.5, list(text.encode()))
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
        (tokenizer.decode([dog]), -0.5),
        (text, -1.5),
        ("<|end|>", -2.25),
    ]
    assert served.engine.requests[0].logprobs == 3


@pytest.mark.parametrize(("asked", "on_the_wire"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)])
async def test_a_chat_without_alternatives_has_an_empty_list_of_them(
    served: Served, asked: dict[str, int], on_the_wire: int
) -> None:
    says(served, [70], reason="length", logprob_of=lambda token: told(token) if on_the_wire else told(token, top=()))
    answer = chat_of(await raw(served, "chat/completions", messages=[HI], logprobs=True, **asked))
    assert served.engine.requests[0].logprobs == on_the_wire
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [min(on_the_wire, 1)]


async def test_who_does_not_ask_gets_null_and_costs_the_engine_nothing(served: Served) -> None:
    says(served, [70], reason="length")
    assert chat_of(await raw(served, "chat/completions", messages=[HI])).choices[0].logprobs is None
    assert completion_of(await raw(served, "completions", prompt="x")).choices[0].logprobs is None
    assert [request.logprobs for request in served.engine.requests] == [None, None]
    assert [request.prompt_logprobs for request in served.engine.requests] == [None, None]


async def test_pieces_of_a_character_have_its_true_bytes_and_a_replacement_for_text(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "🧿")
    assert len(ids) > 1
    says(served, *[[token] for token in ids], reason="length")
    answer = chat_of(await raw(served, "chat/completions", messages=[HI], logprobs=True, top_logprobs=1))
    assert answer.choices[0].message.content == "🧿"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes or []) == "🧿".encode()
    assert all("\ufffd" in entry.token for entry in entries)
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)


async def test_a_completion_has_four_lists_of_one_length(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "世 fox")
    other = ids_of(tokenizer, " dog")[0]
    says(served, ids, reason="length", logprob_of=lambda token: told(token, -2.0, 2, [(other, -0.25)]))
    answer = completion_of(await raw(served, "completions", prompt="x", logprobs=1))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    texts = [tokenizer.decode([token]) for token in ids]
    assert logprobs.tokens == texts
    assert logprobs.token_logprobs == [-2.0] * len(ids)
    assert logprobs.top_logprobs == [{tokenizer.decode([other]): -0.25, text: -2.0} for text in texts]
    assert logprobs.text_offset == [0, 0, 0, 1]  # three pieces of a character, and a word


async def test_zero_logprobs_of_a_completion_are_those_of_the_chosen_tokens(served: Served) -> None:
    says(served, [70, 71], reason="length", logprob_of=lambda token: told(token, -token / 100, 9, [(99, -0.1)]))
    answer = completion_of(await raw(served, "completions", prompt="x", logprobs=0))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.7, -0.71]
    assert [list(top.values()) for top in logprobs.top_logprobs or []] == [[-0.7], [-0.71]]


async def test_of_two_alternatives_with_one_text_the_more_probable_is_told(
    served: Served, tokenizer: Tokenizer
) -> None:
    first, second = ids_of(tokenizer, "🧿")[:2]
    assert tokenizer.decode([first]) == tokenizer.decode([second]) == "\ufffd"
    says(served, [70], reason="length", logprob_of=lambda token: told(token, -3.0, 3, [(first, -0.5), (second, -1.0)]))
    answer = completion_of(await raw(served, "completions", prompt="x", logprobs=2))
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.top_logprobs == [{"\ufffd": -0.5, tokenizer.decode([70]): -3.0}]


async def test_what_cannot_be_is_as_unlikely_as_json_can_say(served: Served) -> None:
    says(served, [70], reason="length", logprob_of=lambda token: told(token, -math.inf, 9, [(71, -math.inf)]))
    answer = completion_of(await raw(served, "completions", prompt="x", logprobs=1))
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-9999.0]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_token_is_not_told_as_its_text_is_not_shown(
    served: Served, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    says(served, [70], [71, END])
    data = await raw(served, "completions", prompt="x", logprobs=0, stream=is_streamed)
    chunks = completion_chunks_of(data) if is_streamed else [completion_of(data)]
    told_of = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    tokens = [token for logprobs in told_of for token in logprobs.tokens or []]
    assert tokens == [tokenizer.decode([70]), tokenizer.decode([71])]


async def test_a_stop_token_that_is_to_be_shown_is_told(served: Served, tokenizer: Tokenizer) -> None:
    stop = ids_of(tokenizer, "!")[0]
    says(served, [70], [stop])
    asked = {"logprobs": True, "stop_token_ids": [stop], "include_stop_str_in_output": True}
    answer = chat_of(await raw(served, "chat/completions", messages=[HI], **asked))
    assert answer.choices[0].message.content == tokenizer.decode([70]) + "!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert [entry.token for entry in answer.choices[0].logprobs.content] == [tokenizer.decode([70]), "!"]


@pytest.mark.parametrize("shows_stop", [False, True])
async def test_logprobs_of_a_stream_come_with_their_text_and_none_of_what_is_cut_off(
    served: Served, tokenizer: Tokenizer, shows_stop: bool
) -> None:
    ids = ids_of(tokenizer, "12345")  # one digit a token
    assert len(ids) == 5
    says(served, *[[token] for token in ids], reason="length")
    served.engine.pause_s = 0.02
    data = await raw(
        served, "completions", prompt="x", logprobs=0, stop="34", include_stop_str_in_output=shows_stop, stream=True
    )
    chunks = completion_chunks_of(data)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    expected = "1234" if shows_stop else "12"
    assert "".join(choice.text for choice in choices) == expected
    for choice in choices:
        assert "".join((choice.logprobs.tokens if choice.logprobs else None) or []) == choice.text
    offsets = [choice.logprobs.text_offset for choice in choices if choice.logprobs is not None]
    assert [offset for each in offsets for offset in each or []] == list(range(len(expected)))
    assert choices[-1].finish_reason == "stop"


async def test_text_that_was_held_back_for_a_stop_string_that_does_not_come_is_told_at_the_end(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "123")
    says(served, *[[token] for token in ids], reason="length")
    data = await raw(served, "completions", prompt="x", logprobs=0, stop="234", stream=True)
    choices = [choice for chunk in completion_chunks_of(data) for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "123"
    told_tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or []]
    assert told_tokens == ["1", "2", "3"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echo_puts_the_prompt_and_its_logprobs_in_front(
    served: Served, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    prompt, ids = ids_of(tokenizer, "a 世"), ids_of(tokenizer, " fox")
    says(served, ids, reason="length", logprob_of=lambda token: told(token, -token / 1024))
    data = await raw(served, "completions", prompt="a 世", echo=True, logprobs=1, stream=is_streamed)
    assert served.engine.requests[0].prompt_logprobs == served.engine.requests[0].logprobs == 1
    if is_streamed:
        choices = [choice for chunk in completion_chunks_of(data) for choice in chunk.choices]
    else:
        choices = completion_of(data).choices
    assert "".join(choice.text for choice in choices) == "a 世 fox"
    told_of = [choice.logprobs for choice in choices if choice.logprobs is not None]
    logprobs = [logprob for each in told_of for logprob in each.token_logprobs or []]
    assert logprobs == [-token / 1024 for token in [*prompt[1:], *ids]]  # the first's null is taken out before
    assert [token for each in told_of for token in each.tokens or []] == [
        tokenizer.decode([token]) for token in [*prompt, *ids]
    ]
    offsets = [offset for each in told_of for offset in each.text_offset or []]
    assert offsets[0] == 0 and offsets[len(prompt)] == len("a 世")
    assert data.count(b"null") >= 2


async def test_an_echo_of_ids_is_their_text_without_special_tokens(served: Served, tokenizer: Tokenizer) -> None:
    says(served, [70], reason="length")
    answer = completion_of(await raw(served, "completions", prompt=[1, *ids_of(tokenizer, "fox")], echo=True))
    assert answer.choices[0].text == "fox" + tokenizer.decode([70])
    assert answer.choices[0].logprobs is None
    assert served.engine.requests[0].prompt_logprobs is None


async def test_stop_strings_are_not_looked_for_in_an_echoed_prompt(served: Served, tokenizer: Tokenizer) -> None:
    says(served, ids_of(tokenizer, " and on"), reason="length")
    answer = completion_of(await raw(served, "completions", prompt="stop", echo=True, stop="stop"))
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("stop and on", "length")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echo_of_the_prompt_alone_scores_it(served: Served, tokenizer: Tokenizer, is_streamed: bool) -> None:
    ids = ids_of(tokenizer, "one two")
    says(served, reason="length", logprob_of=lambda token: told(token, -0.125))
    data = await raw(served, "completions", prompt=ids, echo=True, max_tokens=0, logprobs=1, stream=is_streamed)
    assert served.engine.requests[0].max_tokens == 0
    if is_streamed:
        choices = [choice for chunk in completion_chunks_of(data) for choice in chunk.choices]
    else:
        answer = completion_of(data)
        choices = answer.choices
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, len(ids))
    assert "".join(choice.text for choice in choices) == "one two"
    assert choices[-1].finish_reason == "length"
    assert choices[0].logprobs is not None
    assert choices[0].logprobs.token_logprobs == [-0.125] * (len(ids) - 1)


async def test_prompt_logprobs_are_by_token_id_as_in_vllm(served: Served, tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, " fox")[:1], 70, END]
    says(served, [71], reason="length", logprob_of=lambda token: told(token, -1.0, 7, [(72, -0.25), (73, -0.5)]))
    _, body = await served.complete(prompt=ids, prompt_logprobs=1)
    expected = [
        None,
        {
            "72": {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.decode([72])},
            "70": {"logprob": -1.0, "rank": 7, "decoded_token": tokenizer.decode([70])},
        },
        {
            "72": {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.decode([72])},
            "2": {"logprob": -1.0, "rank": 7, "decoded_token": "<|end|>"},
        },
    ]
    assert body["choices"][0]["prompt_logprobs"] == expected
    assert body["choices"][0]["logprobs"] is None
    _, body = await served.chat(prompt_logprobs=0)
    assert "prompt_logprobs" not in body["choices"][0]
    assert len(body["prompt_logprobs"]) == len(served.engine.requests[1].prompt_tokens)
    assert all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])


async def test_prompt_logprobs_and_an_echo_have_as_many_alternatives_as_each_asks_for(served: Served) -> None:
    best = [(72, -0.25), (73, -0.5), (74, -0.75)]
    says(served, [71], reason="length", logprob_of=lambda token: told(token, -1.0, 7, best))
    _, body = await served.complete(prompt=[70, 70], echo=True, logprobs=1, prompt_logprobs=3)
    (choice,) = body["choices"]
    assert served.engine.requests[0].prompt_logprobs == 3
    assert list(choice["prompt_logprobs"][1]) == ["72", "73", "74", "70"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


def without_logprobs(request: Request) -> list[RequestUpdate]:
    updates = updates_for(request, [[70], [71]], "length")
    updates[-1].logprobs = []
    return updates


def without_prompt_logprobs(request: Request) -> list[RequestUpdate]:
    updates = updates_for(request, [[70], [71]], "length")
    updates[0].prompt_logprobs = updates[0].prompt_logprobs[1:]
    return updates


@pytest.mark.parametrize("script", [without_logprobs, without_prompt_logprobs])
async def test_logprobs_that_do_not_fit_the_tokens_are_an_error_and_not_an_answer(served: Served, script: Any) -> None:
    served.engine.script = script
    status, body = await served.complete(prompt=[5, 6, 7], echo=True, logprobs=1)
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert "logprobs of" in body["error"]["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_prompts_logprobs_are_written_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    threads = set[str]()
    codec = served.app[MODEL].codec
    token_bytes = codec.token_bytes

    def recording(token: int) -> bytes | None:
        threads.add(threading.current_thread().name.partition("_")[0])
        return token_bytes(token)

    monkeypatch.setattr(codec, "token_bytes", recording)
    says(served, [71], reason="length")
    await raw(served, "completions", prompt=[70] * 9, echo=True, logprobs=1, stream=is_streamed)
    assert threads == {"tokenizer"}
    if not is_streamed:
        await raw(served, "completions", prompt=[70] * 9, prompt_logprobs=1)
        await raw(served, "chat/completions", messages=[HI], prompt_logprobs=1)
    assert threads == {"tokenizer"}
