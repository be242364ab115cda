"""Penalties, bias, least lengths and suppressed ids in a real engine: token for token transformers' generate."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CLIENT, GREEDY, build, run
from msgspec.structs import replace
from oracles import load_oracle, oracle_logits, save_tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pegahpc.engine.loop import Engine
from pegahpc.wire.messages import Finished, Request, Sampling

VOCAB = 320
PROMPTS = [[5, 6, 7, 8, 9], [3 + (7 * i) % 300 for i in range(30)], [40]]
NUM_TOKENS = 24
SUPPRESSED, BEGIN_SUPPRESSED = [12, 100, 319], [200, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build(folder)


def answers(engine: Engine, sampling: Sampling = GREEDY, **fields: Any) -> list[list[int]]:
    """All prompts at once."""
    asked = [Request(id=str(i), prompt_tokens=prompt, max_tokens=NUM_TOKENS, sampling=sampling)
             for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    collected = run(engine, [replace(request, **fields) for request in asked])
    return [collected.tokens[str(i)] for i in range(len(PROMPTS))]


def generated(oracle: PreTrainedModel, **settings: Any) -> list[list[int]]:
    """What the official generate says to each prompt."""
    assert oracle.generation_config is not None
    oracle.generation_config.eos_token_id = None
    out = []
    for prompt in PROMPTS:
        with torch.no_grad():
            tokens = oracle.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, **settings
            )
        out.append(tokens[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_repetition_penalty(engine: Engine, oracle: PreTrainedModel, penalty: float) -> None:
    got = answers(engine, replace(GREEDY, repetition_penalty=penalty))
    assert got == generated(oracle, repetition_penalty=penalty) != generated(oracle)


def test_a_bias(engine: Engine, oracle: PreTrainedModel) -> None:
    plain = generated(oracle)
    bias = {plain[0][0]: -3.0, 250: 4.0, plain[1][3]: -100.0}
    want = generated(oracle, sequence_bias=[[[token], value] for token, value in bias.items()])
    assert answers(engine, replace(GREEDY, logit_bias=tuple(bias.items()))) == want != plain


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (-1.0, 0.5), (2.0, 2.0)])
def test_presence_and_frequency_penalties(
    engine: Engine, oracle: PreTrainedModel, presence: float, frequency: float
) -> None:
    """transformers has none: the official model's logits, and OpenAI's formula written out."""
    prompt = PROMPTS[0]
    wanted: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = oracle_logits(oracle, prompt + wanted)[-1].tolist()
        for token, count in Counter(wanted).items():
            logits[token] -= count * frequency + presence
        wanted.append(max(range(VOCAB), key=logits.__getitem__))
    got = answers(engine, replace(GREEDY, presence_penalty=presence, frequency_penalty=frequency))
    assert got[0] == wanted != generated(oracle)[0]


@pytest.mark.parametrize("least", [1, 5, NUM_TOKENS])
def test_a_least_length(engine: Engine, oracle: PreTrainedModel, least: int) -> None:
    """Stop tokens that the model wants early on: each is drawn as soon as it may be, or not at all."""
    stops = sorted({token for answer in generated(oracle) for token in answer[:3]})
    want = generated(oracle, min_new_tokens=least, eos_token_id=stops)
    want = [answer[: next((i + 1 for i, t in enumerate(answer) if t in stops), None)] for answer in want]
    got = answers(engine, min_tokens=least, stop_token_ids=(*stops, 999))
    assert got == want and all(len(answer) >= least for answer in got)
    assert not any(token in stops for answer in got for token in answer[: least - 1])


def test_a_least_length_of_the_whole_ends_by_length(engine: Engine, oracle: PreTrainedModel) -> None:
    stop = generated(oracle)[0][0]
    asked = Request(id="a", prompt_tokens=PROMPTS[0], max_tokens=6, sampling=GREEDY, stop_token_ids=(stop,))
    assert run(engine, [asked]).tokens["a"] == [stop]
    collected = run(engine, [replace(asked, min_tokens=6)])
    assert collected.terminals["a"] == Finished(reason="length", prompt_tokens=5, completion_tokens=6)
    assert stop not in collected.tokens["a"]


def test_suppressed_ids_of_the_checkpoint(folder: Path, oracle: PreTrainedModel, tmp_path: Path) -> None:
    """generation_config.json's, and 20 ids of padding above the tokenizer's, whatever bias they are given."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    plain, padding = generated(oracle), list(range(300, VOCAB))
    suppressed, begin = [*SUPPRESSED, plain[0][2]], [*BEGIN_SUPPRESSED, *(answer[0] for answer in plain)]
    said = generated(oracle, suppress_tokens=suppressed + padding, begin_suppress_tokens=begin)
    begin.append(next(token for token in said[0][1:] if token not in {answer[0] for answer in said}))
    config = {"suppress_tokens": suppressed, "begin_suppress_tokens": begin}
    (copy / "generation_config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({f"w{idx}": idx for idx in range(300)}, unk_token="w0")).save(str(copy / "tokenizer.json"))
    engine = build(copy)
    want = generated(oracle, suppress_tokens=suppressed + padding, begin_suppress_tokens=begin)
    assert begin[-1] in want[0][1:], "an answer that this test cannot judge"
    assert answers(engine) == want != plain
    pushed = replace(GREEDY, logit_bias=tuple((token, 100.0) for token in {*padding, *SUPPRESSED}))
    assert answers(engine, pushed)[0][0] == want[0][0]
    for sampling in (pushed, replace(pushed, temperature=2.0, seed=3)):
        drawn = answers(engine, sampling)
        assert not {token for answer in drawn for token in answer} & {*suppressed, *padding}
        assert not {answer[0] for answer in drawn} & {*begin}


def test_all_of_them_together(engine: Engine, oracle: PreTrainedModel) -> None:
    stops = sorted({token for answer in generated(oracle) for token in answer[:2]})
    bias = {250: 3.0, 11: -2.0}
    in_our_order = LogitsProcessorList(  # generate's own is the bias first
        [RepetitionPenaltyLogitsProcessor(1.2), SequenceBiasLogitsProcessor([[[t], v] for t, v in bias.items()])]
    )
    want = generated(oracle, logits_processor=in_our_order, min_new_tokens=NUM_TOKENS, eos_token_id=stops)
    sampling = replace(GREEDY, repetition_penalty=1.2, logit_bias=tuple(bias.items()))
    assert answers(engine, sampling, min_tokens=NUM_TOKENS, stop_token_ids=tuple(stops)) == want


def test_what_a_request_remembers_for_its_penalties_goes_with_it(engine: Engine) -> None:
    sampling = replace(GREEDY, repetition_penalty=1.2)
    for number, ending in enumerate(("end", "abort")):
        name = f"{number}"
        engine.submit(CLIENT, Request(id=name, prompt_tokens=[5, 6, 6], max_tokens=4, sampling=sampling))
        waiting = engine.scheduler.waiting[CLIENT, name]
        assert waiting.edits is None, "nothing is held for a request that waits"
        engine.step()
        assert waiting.edits is not None and waiting.edits.seen is not None
        assert waiting.edits.seen.counts.tolist()[:2] == [waiting.tokens[3:].count(token) for token in (5, 6)]
        remembered = weakref.ref(waiting.edits)
        del waiting
        if ending == "abort":
            engine.abort(CLIENT, name)
        while engine.scheduler.has_work:
            engine.step()
        gc.collect()
        assert remembered() is None
