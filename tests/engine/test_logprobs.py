"""Logprobs and ranks: numbers worked out by hand, a float64 softmax, Python's sort; neighbours change no bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegahpc.engine import ranking
from pegahpc.engine.logprobs import Asked, token_logprobs
from pegahpc.wire.messages import TokenLogprob


def logits_of(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def of_row(logits: list[float], token: int, num_top: int = 0, suppressed: list[int] | None = None) -> TokenLogprob:
    suppressed_ids = None if suppressed is None else torch.tensor(suppressed, dtype=torch.int64)
    (found,) = token_logprobs(torch.tensor([logits]), [Asked(token, num_top)], suppressed_ids)
    return found


def test_known_probabilities_come_back() -> None:
    probs = [0.125, 0.5, 0.25, 0.125]
    found = of_row([math.log(p) + 7.5 for p in probs], 2, num_top=4)
    assert found.token == 2 and found.rank == 2
    assert found.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2, 0, 3], "of equals the lower id"
    assert [logprob for _, logprob in found.top] == pytest.approx([math.log(p) for p in (0.5, 0.25, 0.125, 0.125)])


@pytest.mark.parametrize("vocab", [1, 2, 311, 3072])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_over_the_whole_vocabulary_they_sum_to_one(vocab: int, shift: float) -> None:
    """The engine tells 20 at most; the function itself has no such bound."""
    logits = logits_of(3, vocab) + shift
    for found in token_logprobs(logits, [Asked(vocab - 1, vocab)] * 3):
        assert math.fsum(math.exp(logprob) for _, logprob in found.top) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("vocab", [5, 311, 50_257])
def test_they_are_a_float64_log_softmax_to_within_float32(vocab: int) -> None:
    logits = logits_of(4, vocab)
    want = logits.double().log_softmax(-1)
    for row, found in enumerate(token_logprobs(logits, [Asked((7 * i) % vocab, 5) for i in range(4)])):
        assert found.logprob == pytest.approx(want[row, found.token].item(), abs=1e-6)
        assert [logprob for _, logprob in found.top] == pytest.approx(
            want[row, [i for i, _ in found.top]].tolist(), abs=1e-6
        )


def test_vanishing_and_certain_tokens_have_finite_logprobs() -> None:
    found = of_row([3e38, -3e38, 0.0], 1, num_top=3)
    assert found.logprob == pytest.approx(-6e38) and found.rank == 3
    assert found.top[0] == (0, 0.0)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0]), min_size=1, max_size=30), st.data())
def test_a_rank_is_the_place_in_the_order_of_the_best(logits: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    suppressed = sorted(data.draw(st.sets(st.integers(0, len(logits) - 1))))
    num_top = data.draw(st.integers(0, len(logits)))
    found = of_row(logits, token, num_top=num_top, suppressed=suppressed)
    order = sorted(range(len(logits)), key=lambda idx: (-logits[idx], idx))
    drawable = [idx for idx in order if idx not in suppressed]
    assert [idx for idx, _ in found.top] == drawable[:num_top]
    before = order[: order.index(token)]
    assert found.rank == 1 + len([idx for idx in before if idx not in suppressed])


def test_suppressed_ids_count_in_the_sum_and_are_never_shown() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    found = of_row(logits, 1, num_top=4, suppressed=[0, 3])
    assert found.rank == 1 and found.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [token for token, _ in found.top] == [1, 2], "shorter than asked for: no more can be drawn"
    hidden = of_row(logits, 0, num_top=1, suppressed=[0, 3])
    assert hidden.logprob == pytest.approx(math.log(0.5), abs=1e-6) and hidden.rank == 1
    assert [token for token, _ in hidden.top] == [1]


def test_each_row_gets_as_many_of_the_best_as_it_asked_for() -> None:
    found = token_logprobs(logits_of(4, 30), [Asked(3, count) for count in (0, 5, 1, 20)])
    assert [len(each.top) for each in found] == [0, 5, 1, 20]
    assert token_logprobs(torch.zeros(0, 30), []) == []


@pytest.mark.parametrize("vocab", [1, 7, 3073, 40_001])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_its_neighbours_or_on_threads(
    vocab: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 values, so that many are equal; neighbours that ask for more, pieces of one row, more threads."""
    logits = logits_of(6, vocab).bfloat16().float()
    asked = [Asked((5 * row) % vocab, count) for row, count in enumerate((0, 3, 20, 1, 20, 7))]

    def one_by_one() -> list[TokenLogprob]:
        return [token_logprobs(logits[row : row + 1].clone(), [each])[0] for row, each in enumerate(asked)]

    alone = one_by_one()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert one_by_one() == alone
        assert token_logprobs(logits.clone(), asked) == alone
        assert token_logprobs(logits.flip(0).clone(), asked[::-1]) == alone[::-1]
        monkeypatch.setattr(ranking, "PIECE_ELEMENTS", vocab)
        assert token_logprobs(logits.clone(), asked) == alone
    finally:
        torch.set_num_threads(before)
