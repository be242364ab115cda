"""Penalties, bias and masks: against transformers' processors, and OpenAI's formula worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from pegahpc.engine.logit_edits import LogitEdits, SeenTokens, edit_logits
from pegahpc.wire.messages import Sampling

VOCAB = 50
PROMPT = [3, 4, 3, 17, 49]
ANSWER = [17, 8, 8, 0, 8]
INF = float("inf")


@dataclass
class Row:
    """A row as the sampler hands it over."""

    edits: LogitEdits | None = None
    banned_ids: tuple[int, ...] = ()


def row(prompt: list[int], answer: list[int], banned_ids: tuple[int, ...] = (), **sampling: Any) -> Row:
    edits = LogitEdits.wanted_by(Sampling(**sampling), prompt, most=VOCAB)
    for token in answer:
        if edits is not None:
            edits.add(token)
    return Row(edits, banned_ids)


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edited(logits: torch.Tensor, rows: list[Row], suppressed: list[int] | None = None) -> torch.Tensor:
    """A copy, edited."""
    logits = logits.clone()
    edit_logits(logits, rows, None if suppressed is None else torch.tensor(suppressed))
    return logits


def history(*tokens: int) -> Any:
    """Input ids; transformers asks for a LongTensor, which no function returns."""
    return torch.tensor([tokens])


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 1.3, 2.0])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    logits = logits_of(1)
    want = RepetitionPenaltyLogitsProcessor(penalty)(history(*PROMPT, *ANSWER), logits.clone())
    got = edited(logits, [row(PROMPT, ANSWER, repetition_penalty=penalty)])
    assert torch.allclose(got, want, rtol=1e-6, atol=0)
    assert (got != logits).sum() == (0 if penalty == 1 else len({*PROMPT, *ANSWER}))


def test_the_bias_is_transformers() -> None:
    logits, bias = logits_of(1), ((1, 100.0), (8, -100.0), (30, 0.25), (49, -1.5))
    want = SequenceBiasLogitsProcessor([[[idx], value] for idx, value in bias])(history(1, 2), logits.clone())
    assert torch.allclose(edited(logits, [row([], [], logit_bias=bias)]), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_answer", [0, 2, 3, 4])
def test_stop_tokens_are_masked_as_transformers_masks_them(num_answer: int) -> None:
    """Which rows ask for it is the reader's part (`readout`): so long as fewer than the least number are generated."""
    logits, stops = logits_of(1), (7, 30)
    tokens = history(*PROMPT, *range(num_answer))
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, list(stops))
    got = edited(logits, [Row(banned_ids=stops if num_answer < 3 else ())])
    assert torch.equal(got, processor(tokens, logits.clone()))


def test_suppressed_ids_are_masked_on_every_row() -> None:
    logits = logits_of(3)
    want = SuppressTokensLogitsProcessor([0, 48, 49])(history(1), logits.clone())
    assert torch.equal(edited(logits, [Row()] * 3, suppressed=[0, 48, 49]), want)


def test_presence_and_frequency_are_openais_formula() -> None:
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c[j] of the generated tokens alone."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 17], logits[0, 3] = 2.0, -1.0, 1.0
    got = edited(logits, [row(PROMPT, ANSWER, presence_penalty=0.5, frequency_penalty=0.25)])[0]
    assert got[8] == 2.0 - 3 * 0.25 - 0.5  # generated three times
    assert got[17] == -1.0 - 0.25 - 0.5  # once, and it stands in the prompt
    assert got[0] == 0.0 - 0.25 - 0.5
    assert got[3] == 1.0 and got[4] == got[49] == 0.0  # in the prompt alone
    negative = edited(logits, [row(PROMPT, ANSWER, presence_penalty=-2.0, frequency_penalty=-2.0)])[0]
    assert negative[8] == 2.0 + 3 * 2.0 + 2.0


def test_repetition_comes_first_then_presence_and_frequency_then_the_bias() -> None:
    logits = torch.full((1, VOCAB), 3.0)
    asked: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "logit_bias": ((8, 4.0),),
    }
    got = edited(logits, [row(PROMPT, ANSWER, **asked)])[0]
    assert got[8] == 3.0 / 1.5 - 3 * 0.5 - 1.0 + 4.0
    assert got[3] == 3.0 / 1.5 and got[20] == 3.0


def test_a_mask_stands_against_every_bias_and_penalty() -> None:
    asked: dict[str, Any] = {
        "logit_bias": ((5, 100.0), (6, 100.0)),
        "presence_penalty": -2.0,
        "repetition_penalty": 0.01,
    }
    got = edited(logits_of(1), [row([5, 6], [5, 6], banned_ids=(6,), **asked)], suppressed=[5])[0]
    assert got[5] == got[6] == -INF and got.isfinite().sum() == VOCAB - 2


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e308])
@pytest.mark.parametrize("logit", [0.0, -0.0, 1e-45, 3.4e38, -3.4e38])
def test_what_leaves_float32_is_cut_and_is_never_nan(penalty: float, logit: float) -> None:
    logits = torch.full((1, VOCAB), logit)
    bias = tuple((idx, 100.0) for idx in range(VOCAB))
    got = edited(logits, [row(list(range(VOCAB)), [], repetition_penalty=penalty, logit_bias=bias)])
    assert got.isfinite().all()


def test_each_row_gets_its_own_edits_and_the_others_keep_their_bits() -> None:
    asked: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {},
        {"presence_penalty": 0.7, "frequency_penalty": -0.3},
        {"logit_bias": ((1, 2.0), (2, -3.0))},
        {"repetition_penalty": 0.8, "frequency_penalty": 1.0, "logit_bias": ((49, 9.0),)},
    ]
    rows = [row(PROMPT[: 1 + i], ANSWER[i:], (i, 10 + i) if i % 2 else (), **each) for i, each in enumerate(asked)]
    logits = logits_of(len(rows))
    together = edited(logits, rows, suppressed=[33])
    for i, each in enumerate(rows):
        assert torch.equal(together[i : i + 1], edited(logits[i : i + 1], [each], suppressed=[33]))
    assert torch.equal(edited(logits, [Row()] * 5), logits)


def test_a_request_that_asks_for_nothing_has_no_edits() -> None:
    assert LogitEdits.wanted_by(Sampling(temperature=0.3, top_p=0.5), PROMPT, most=9) is None


@given(st.lists(st.integers(0, VOCAB - 1)), st.lists(st.integers(0, VOCAB - 1), max_size=200))
def test_counts_kept_step_by_step_are_those_of_the_whole_history(prompt: list[int], answer: list[int]) -> None:
    seen = SeenTokens(prompt, len({*prompt, *answer}))
    for number, token in enumerate(answer):
        seen.add(token)
        assert len(seen.ids) == len({*prompt, *answer[: number + 1]})
    counted = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
    assert counted == dict.fromkeys(prompt, 0) | Counter(answer)
