"""The whole of `sample` against transformers' processors and warpers: the probabilities, not only some draws.

The draw is replaced by evenly spaced numbers, so that each token is drawn in proportion to its probability, exactly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pegahpc.engine import ranking, sampler
from pegahpc.engine.logit_edits import LogitEdits
from pegahpc.engine.sampler import Draw, sample
from pegahpc.wire.messages import Sampling

VOCAB = 60
NUM_DRAWS = 4000
PROMPT = [3, 4, 5, 59, 3]
SUPPRESSED = [0, 17, 58]


def even_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 0, 1, 2, ... becomes the middle of the first, second, third part of [0, 1)."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: (seed + 0.5) / NUM_DRAWS)


def logits_of(num_rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def shares(logits: torch.Tensor, **asked: Any) -> torch.Tensor:
    """How often each token of one row is drawn."""
    draws = []
    for seed in range(NUM_DRAWS):
        sampling = Sampling(seed=seed, **asked)
        draws.append(Draw(sampling, 9, LogitEdits.wanted_by(sampling, PROMPT, most=VOCAB)))
    tokens, finite = sample(logits.expand(NUM_DRAWS, -1).clone(), draws, torch.tensor(SUPPRESSED))
    assert all(finite)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / NUM_DRAWS


def wanted(logits: torch.Tensor, *processors: LogitsProcessor) -> torch.Tensor:
    """The probabilities that transformers' classes leave, in this order."""
    first = SuppressTokensLogitsProcessor(SUPPRESSED)
    input_ids: Any = torch.tensor([PROMPT])
    scores: torch.Tensor = LogitsProcessorList([first, *processors])(input_ids, logits.clone())
    return scores.softmax(-1)[0]


SETTINGS: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "plain": ({}, []),
    "hot": ({"temperature": 1.7}, [TemperatureLogitsWarper(1.7)]),
    "cold": ({"temperature": 0.4}, [TemperatureLogitsWarper(0.4)]),
    "top_k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "min_p, hot": ({"temperature": 1.7, "min_p": 0.1}, [TemperatureLogitsWarper(1.7), MinPLogitsWarper(0.1)]),
    "top_k, top_p": ({"top_k": 9, "top_p": 0.7}, [TopKLogitsWarper(9), TopPLogitsWarper(0.7)]),
    "min_p, top_p": ({"min_p": 0.05, "top_p": 0.7}, [MinPLogitsWarper(0.05), TopPLogitsWarper(0.7)]),
    "min_p, top_k": ({"min_p": 0.05, "top_k": 3}, [MinPLogitsWarper(0.05), TopKLogitsWarper(3)]),
    "all of them": (
        {
            "repetition_penalty": 1.5, "logit_bias": ((5, 3.0), (6, -100.0)), "temperature": 1.3, "min_p": 0.02,
            "top_k": 15, "top_p": 0.9,
        },
        [
            RepetitionPenaltyLogitsProcessor(1.5), SequenceBiasLogitsProcessor([[[5], 3.0], [[6], -100.0]]),
            TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.02), TopKLogitsWarper(15), TopPLogitsWarper(0.9),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_token_has_the_probability_that_transformers_gives_it(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    even_draws(monkeypatch)
    asked, processors = SETTINGS[name]
    logits = logits_of(1, seed=seed)
    got, want = shares(logits, **asked), wanted(logits, *processors)
    assert (want == 0).sum() >= len(SUPPRESSED) and (got[want == 0] == 0).all()
    assert float((got - want).abs().max()) <= 1.01 / NUM_DRAWS, "a token's part of [0, 1) has one draw more or less"


def test_a_bias_of_the_logarithm_of_three_makes_a_token_three_times_as_probable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even_draws(monkeypatch)
    got = shares(torch.zeros(1, VOCAB), logit_bias=((1, 1.0986122886681098),))
    assert got[1] == pytest.approx(3 / (VOCAB - 3 + 2), abs=1.01 / NUM_DRAWS)
    assert got[2] == pytest.approx(1 / (VOCAB - 3 + 2), abs=1.01 / NUM_DRAWS)


ANY_SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 4, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.2, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    seed=st.integers(0, (1 << 64) - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.5, 5e-324, 1e308]),
    presence_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.5, 100.0]), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ANY_SAMPLING, min_size=1, max_size=9), st.integers(0, 1000), st.sampled_from([1, VOCAB, 1 << 20]))
def test_a_row_draws_the_same_alone_and_among_any_neighbours(
    rows: list[Sampling], seed: int, piece_elements: int
) -> None:
    logits = logits_of(len(rows), seed=seed).bfloat16().float()
    draws = [Draw(s, 5 + i, LogitEdits.wanted_by(s, PROMPT, most=VOCAB), (4,) * (i % 2)) for i, s in enumerate(rows)]
    suppressed = torch.tensor(SUPPRESSED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "PIECE_ELEMENTS", piece_elements)
        together, finite = sample(logits.clone(), draws, suppressed)
    assert all(finite) and not {*together} & {*SUPPRESSED}
    for row, draw in enumerate(draws):
        assert sample(logits[row : row + 1].clone(), [draw], suppressed)[0] == [together[row]]


def test_where_all_but_one_token_is_masked_that_one_is_drawn() -> None:
    banned = tuple(idx for idx in range(VOCAB) if idx not in (*SUPPRESSED, 30))
    for sampling in (Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.5), Sampling(min_p=0.9, top_k=2)):
        draw = Draw(sampling, 5, banned_ids=banned)
        assert sample(torch.full((1, VOCAB), -3e38), [draw], torch.tensor(SUPPRESSED)) == ([30], [True])


def test_a_bias_that_pushes_every_token_down_or_up_leaves_the_order() -> None:
    logits = logits_of(1)
    logits[0, SUPPRESSED] = -50.0
    for bias in (-100.0, 100.0):
        sampling = Sampling(temperature=0.0, logit_bias=tuple((idx, bias) for idx in range(VOCAB)))
        draw = Draw(sampling, 5, LogitEdits.wanted_by(sampling, PROMPT, most=VOCAB))
        assert sample(logits.clone(), [draw])[0] == [int(logits.argmax())]
