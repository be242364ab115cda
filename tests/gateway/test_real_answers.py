"""Gateway and engine together, by the official client: probabilities, seeds and choices of the shipped model."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import TINY_MOE, greedy, load_oracle, oracle_logits
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.fleet.live_fleet import LiveFleet
from tests.gateway.conftest import Served
from tests.gateway.strict_client import chat_chunks_of, chat_of, completion_chunks_of, completion_of

ASK = [{"role": "user", "content": "Tell me a story about Tom and a dog."}]
TEXT = "Tom and a dog went to the"
TOLERANCE = 1e-4  # nats, float32 against float32


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return load_oracle(TINY_MOE)


async def raw(served: Served, path: str, **fields: object) -> bytes:
    body = {"model": "tiny-moe", **fields}
    async with served.http.post(f"{served.url}/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


def logprobs_of(oracle: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[num_tokens - 1, vocab]: row i is about token i + 1."""
    return oracle_logits(oracle, tokens).double().log_softmax(-1)[:-1]


def chosen(logprobs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """[num_tokens - 1]: of the tokens from the second on."""
    return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


SHAPES = list(itertools.product([{}, {"n": 3}], [{}, {"logprobs": True, "top_logprobs": 5}], [False, True]))


@pytest.mark.parametrize(("number", "logprobs", "is_streamed"), SHAPES)
async def test_every_chat_is_what_the_official_types_say(
    real: Served, number: dict[str, Any], logprobs: dict[str, Any], is_streamed: bool
) -> None:
    data = await raw(
        real, "chat/completions", messages=ASK, max_tokens=8, seed=1, stream=is_streamed, **number, **logprobs,
        **({"stream_options": {"include_usage": True}} if is_streamed else {}),
    )  # fmt: skip
    num_choices = number.get("n", 1)
    if not is_streamed:
        answer = chat_of(data)
        assert [choice.index for choice in answer.choices] == list(range(num_choices))
        counts = [len(choice.logprobs.content or []) for choice in answer.choices if choice.logprobs is not None]
        usage = answer.usage
    else:
        chunks = chat_chunks_of(data)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        ends = [choice.index for choice in choices if choice.finish_reason is not None]
        assert sorted(ends) == list(range(num_choices))
        told = [choice.logprobs.content or [] for choice in choices if choice.logprobs is not None]
        counts = [sum(map(len, told))] if logprobs else []
        usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert 0 < usage.completion_tokens <= 8 * num_choices
    assert bool(counts) == bool(logprobs) and all(count > 0 for count in counts)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 3},
        {"logprobs": 0, "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"n": 2, "prompt": [TEXT, "One"]},
        {"stop": ["."], "include_stop_str_in_output": True, "max_tokens": 60},
        {"prompt": [[70, 71, 72], [73]], "n": 2, "logprobs": 2, "presence_penalty": 1, "min_tokens": 2},
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_every_completion_is_what_the_official_types_say(
    real: Served, fields: dict[str, Any], is_streamed: bool
) -> None:
    asked = {"prompt": TEXT, "max_tokens": 8, "seed": 1, **fields}
    data = await raw(real, "completions", stream=is_streamed, **asked)
    whole = completion_of(data if not is_streamed else await raw(real, "completions", **asked))
    if is_streamed:  # the same answers in pieces
        choices = [choice for chunk in completion_chunks_of(data) for choice in chunk.choices]
        for one in whole.choices:
            own = [choice for choice in choices if choice.index == one.index]
            assert "".join(choice.text for choice in own) == one.text
            assert own[-1].finish_reason == one.finish_reason
            told = [choice.logprobs for choice in own if choice.logprobs is not None]
            joined = [offset for logprobs in told for offset in logprobs.text_offset or []]
            assert joined == (one.logprobs.text_offset if one.logprobs else [])


async def test_greedy_text_is_that_of_transformers(real: Served, oracle: PreTrainedModel, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT).ids
    answer = await real.client.completions.create(
        model="tiny-moe", prompt=TEXT, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == tokenizer.decode(greedy(oracle, prompt, 24))


async def test_a_repetition_penalty_gives_the_greedy_text_of_transformers(
    real: Served, oracle: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXT).ids
    assert oracle.generation_config is not None
    oracle.generation_config.eos_token_id = None
    with torch.no_grad():
        out = oracle.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0, repetition_penalty=1.5
        )
    answer = await real.client.completions.create(
        model="tiny-moe", prompt=TEXT, temperature=0, max_tokens=24,
        extra_body={"ignore_eos": True, "repetition_penalty": 1.5},
    )  # fmt: skip
    assert answer.choices[0].text == tokenizer.decode(out[0, len(prompt) :].tolist())
    assert answer.choices[0].text != tokenizer.decode(greedy(oracle, prompt, 24))


async def test_a_chats_logprobs_are_those_of_transformers_whatever_bends_the_draw(
    real: Served, oracle: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    answer = await real.client.chat.completions.create(
        model="tiny-moe", messages=[{"role": "user", "content": ASK[0]["content"]}], max_tokens=20, seed=5,
        logprobs=True, top_logprobs=4, temperature=1.5, presence_penalty=1, logit_bias={"70": 3},
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entries = answer.choices[0].logprobs.content
    ids = tokenizer.encode("".join(entry.token for entry in entries), add_special_tokens=False).ids
    prompt = tokenizer.encode(f"<|bos|><|user|>{ASK[0]['content']}<|assistant|>").ids
    assert [tokenizer.decode([token]) for token in ids] == [entry.token for entry in entries], "take another seed"
    logprobs = logprobs_of(oracle, prompt + ids)[len(prompt) - 1 :]
    expected = chosen(logprobs, [prompt[-1], *ids])
    assert torch.tensor([entry.logprob for entry in entries]) == pytest.approx(expected, abs=TOLERANCE)
    best, best_ids = logprobs.topk(4)
    for row, entry in enumerate(entries):
        assert [top.token for top in entry.top_logprobs] == [tokenizer.decode([idx]) for idx in best_ids[row].tolist()]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best[row].tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_an_echo_scores_a_prompt_as_transformers_does(
    real: Served, oracle: PreTrainedModel, tokenizer: Tokenizer, max_tokens: int
) -> None:
    ids = tokenizer.encode(TEXT).ids * 3  # more than a page, and longer than a chunk of logits
    _, body = await real.complete(prompt=ids, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    if max_tokens:
        ids = ids + greedy(oracle, ids, max_tokens)
    ids = ids[: len(logprobs["tokens"])]
    assert len(ids) >= 3 * len(tokenizer.encode(TEXT).ids)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = logprobs_of(oracle, ids)
    assert logprobs["token_logprobs"][1:] == pytest.approx(chosen(expected, ids).tolist(), abs=TOLERANCE)
    for row, top in enumerate(logprobs["top_logprobs"][1:]):
        assert max(top.values()) == pytest.approx(float(expected[row].max()), abs=TOLERANCE)
    assert choice["text"] == tokenizer.decode(ids)


async def test_prompt_logprobs_are_those_of_transformers_with_ranks_and_take_no_hit(
    real: Served, oracle: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT).ids * 4
    await real.complete(prompt=ids, max_tokens=1)  # its pages are cached now
    _, body = await real.complete(prompt=ids, prompt_logprobs=3, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    listed = body["choices"][0]["prompt_logprobs"]
    expected = logprobs_of(oracle, ids)
    assert listed[0] is None and len(listed) == len(ids)
    for row, token in enumerate(ids[1:]):
        entry = listed[row + 1][str(token)]
        assert entry["logprob"] == pytest.approx(float(expected[row, token]), abs=TOLERANCE)
        assert entry["rank"] == int((expected[row] > expected[row, token]).sum()) + 1
        assert entry["decoded_token"] == tokenizer.decode([token])


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


async def test_a_seed_gives_the_same_choices_alone_again_under_load_and_cached(real: Served) -> None:
    asked = {"prompt": TEXT * 4, "n": 4, "seed": 11, "max_tokens": 16}
    _, first = await real.complete(**asked)
    noise = [asyncio.create_task(real.complete(prompt=f"{idx} foxes", max_tokens=24)) for idx in range(6)]
    _, again = await real.complete(**asked)
    await asyncio.gather(*noise)
    assert texts(first) == texts(again)
    assert len(set(texts(first))) > 1
    _, one = await real.complete(**(asked | {"n": 1}))
    assert texts(one) == texts(first)[:1]
    _, other = await real.complete(**(asked | {"seed": 12}))
    assert texts(other) != texts(first)


async def test_prompts_of_a_batch_are_answered_as_alone(real: Served) -> None:
    asked = {"n": 2, "seed": 3, "max_tokens": 12}
    _, batch = await real.complete(prompt=[TEXT, "One two", "The cat"], **asked)
    alone = [texts((await real.complete(prompt=prompt, **asked))[1]) for prompt in (TEXT, "One two", "The cat")]
    assert texts(batch) == [text for answers in alone for text in answers]


async def test_best_of_is_the_choice_of_the_highest_mean_logprob(real: Served) -> None:
    asked = {"prompt": TEXT, "seed": 9, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    _, four = await real.complete(n=4, **asked)
    means = [sum(choice["logprobs"]["token_logprobs"]) / 12 for choice in four["choices"]]
    _, best = await real.complete(best_of=4, n=2, **asked)
    order = sorted(range(4), key=lambda idx: -means[idx])
    assert texts(best) == [four["choices"][idx]["text"] for idx in order[:2]]
    assert best["usage"] == four["usage"] | {"prompt_tokens_details": best["usage"]["prompt_tokens_details"]}
    assert best["usage"]["completion_tokens"] == 48


async def computed_prompt_tokens(real: Served) -> float:
    async with real.http.get(real.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_by_source_total" and sample.labels["source"] == "computed"
    )


async def test_choices_compute_their_prompt_once(real: Served) -> None:
    prompt = [200 + idx for idx in range(49)]  # three pages of 16 and one token
    before = await computed_prompt_tokens(real)
    _, body = await real.complete(prompt=prompt, n=5, max_tokens=4, seed=1)
    assert await computed_prompt_tokens(real) - before == 49 + 4 * 1
    assert body["usage"]["prompt_tokens"] == 49
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_bias_forces_or_bans_a_token_and_min_tokens_puts_off_the_end(
    real: Served, tokenizer: Tokenizer
) -> None:
    fox = tokenizer.encode(" fox", add_special_tokens=False).ids[0]
    _, forced = await real.complete(prompt=TEXT, logit_bias={str(fox): 100}, max_tokens=5)
    assert texts(forced) == [tokenizer.decode([fox] * 5)]
    _, ended = await real.complete(prompt=TEXT, logit_bias={"2": 100}, max_tokens=9)
    assert (texts(ended), ended["usage"]["completion_tokens"]) == ([""], 1)
    _, later = await real.complete(prompt=TEXT, logit_bias={"2": 100}, max_tokens=9, min_tokens=6)
    assert (later["usage"]["completion_tokens"], later["choices"][0]["finish_reason"]) == (7, "stop")
    _, never = await real.complete(prompt=TEXT, logit_bias={"2": -100}, max_tokens=40, seed=1)
    assert never["choices"][0]["finish_reason"] == "length"


async def test_a_frequency_penalty_ends_repetition(real: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" fox dog", add_special_tokens=False).ids
    bias = {str(token): 50 for token in ids}
    _, plain = await real.complete(prompt=TEXT, logit_bias=bias, max_tokens=10, temperature=0, logprobs=0)
    _, fair = await real.complete(
        prompt=TEXT, logit_bias=bias, max_tokens=10, temperature=0, frequency_penalty=2, logprobs=0
    )
    counts = [
        [body["choices"][0]["logprobs"]["tokens"].count(tokenizer.decode([token])) for token in ids]
        for body in (plain, fair)
    ]
    assert max(counts[1]) < max(counts[0])


async def test_streamed_choices_interleave_and_each_is_its_whole_answer(real: Served) -> None:
    asked = {"messages": ASK, "n": 3, "seed": 4, "max_tokens": 12, "ignore_eos": True}
    whole = json.loads(await raw(real, "chat/completions", **asked))
    choices = [
        choice
        for chunk in chat_chunks_of(await raw(real, "chat/completions", stream=True, **asked))
        for choice in chunk.choices
    ]
    for one in whole["choices"]:
        own = "".join(choice.delta.content or "" for choice in choices if choice.index == one["index"])
        assert own == one["message"]["content"]
    order = [choice.index for choice in choices if choice.delta.content]
    assert order[::-1].index(0) < len(order) - 1 - order.index(2)  # the first is not over when the last begins


@pytest.mark.slow
async def test_seeded_choices_and_logprobs_are_to_the_bit_those_of_a_fleet_of_two_ranks(
    real: Served, tmp_path: Path
) -> None:
    asked = {"prompt": [TEXT * 4, "One two"], "n": 3, "seed": 21, "max_tokens": 16, "logprobs": 3, "echo": True}
    _, here = await real.complete(**asked)
    fleet = LiveFleet(tmp_path, "topology=ep2")
    try:
        await asyncio.to_thread(fleet.when_ready)
        url, key = fleet.address()
        headers = {"Authorization": f"Bearer {key}"}
        async with real.http.post(f"{url}/completions", json={"model": "tiny-moe", **asked}, headers=headers) as answer:
            there = await answer.json()
    finally:
        await asyncio.to_thread(fleet.end)
    assert there["choices"] == here["choices"]
    assert there["usage"] == here["usage"]
