"""Draws: greedy ties, the kept sets against plain Python, the frequencies, and that neighbours change nothing."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from pegahpc.engine.sampler import Draw, sample, uniform
from pegahpc.wire.messages import Sampling

GREEDY = Sampling(temperature=0.0)


def logits_of(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draws_of(logits: list[float], count: int, **sampling: Any) -> list[int]:
    """`count` draws from one row of logits, seeds 0, 1, 2, ..."""
    rows = torch.tensor([logits]).expand(count, -1)
    tokens, finite = sample(rows, [Draw(Sampling(**sampling, seed=seed), 5) for seed in range(count)])
    assert all(finite)
    return tokens


@pytest.mark.parametrize("vocab", [1, 7, 300, 3072])
def test_greedy_takes_the_largest_and_of_ties_the_lowest(vocab: int) -> None:
    logits = torch.zeros(4, vocab)
    want = [0, vocab // 2, vocab // 3, 0]
    logits[1, vocab // 2 :] = 2.0
    logits[2, vocab // 3 :: 2] = 2.0
    tokens, finite = sample(logits, [Draw(GREEDY, position) for position in range(4)])
    assert tokens == want and all(finite)


def test_no_draws_give_no_tokens() -> None:
    assert sample(torch.zeros(2, 9), []) == ([], [])


def test_rows_beyond_the_draws_are_padding() -> None:
    logits = torch.zeros(3, 9)
    logits[1:] = float("nan")
    assert sample(logits, [Draw(GREEDY, 1)]) == ([0], [True])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_said_to_be_and_the_others_are_drawn(bad: float, temperature: float) -> None:
    logits = logits_of(3, 9)
    draws = [Draw(Sampling(temperature=temperature, seed=seed), 4) for seed in range(3)]
    clean, _ = sample(logits, draws)
    logits[1, 8] = bad
    tokens, finite = sample(logits, draws)
    assert finite == [True, False, True]
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])


MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """The finaliser as published (Steele, Lea, Flood 2014; variant 13 of Stafford)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_finaliser_is_the_published_one() -> None:
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    assert uniform(0, 0) == (splitmix((0xE220A8397B1DCDAF + 0x9E3779B97F4A7C15) & MASK) >> 11) / (1 << 53)


PINNED = [
    (0, 0, 0.6524484863740322),
    (0, 1, 0.27623358227789463),
    (1, 0, 0.36818951565166946),
    (42, 17, 0.9091152914604308),
    (18446744073709551615, 4095, 0.24203436839397985),
    (1592614989, 1, 0.5415290059761576),
]


@pytest.mark.parametrize(("seed", "position", "value"), PINNED)
def test_draws_never_change(seed: int, position: int, value: float) -> None:
    """A user who keeps a seed keeps a text: these numbers are a promise."""
    assert uniform(seed, position) == value


@pytest.mark.parametrize("along", ["seeds", "positions", "purposes"])
def test_draws_are_uniform_along_every_argument(along: str) -> None:
    count = 20_000
    take = {
        "seeds": lambda i: uniform(i, 3),
        "positions": lambda i: uniform(3, i),
        "purposes": lambda i: uniform(3, 3, i),
    }
    values = [take[along](i) for i in range(count)]
    assert all(0 <= value < 1 for value in values)
    bins = [0] * 100
    for value in values:
        bins[int(value * 100)] += 1
    chi_square = sum((seen - count / 100) ** 2 / (count / 100) for seen in bins)
    assert chi_square < 149, "99 degrees of freedom: one in a thousand is above 148.2"
    neighbours = statistics.correlation(values[:-1], values[1:])
    assert abs(neighbours) < 4 / math.sqrt(count)


def kept(
    logits: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Token -> probability of what may be drawn: temperature, min_p, top_k, top_p over what is left."""
    top = max(logits)
    weights = {token: math.exp((logit - top) / temperature) for token, logit in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])
    order = [token for token in order if weights[token] >= min_p]
    if top_k:
        order = order[:top_k]
    total, mass, chosen = sum(weights[token] for token in order), 0.0, []
    for token in order:
        chosen.append(token)
        mass += weights[token]
        if mass >= top_p * total:
            break
    total = sum(weights[token] for token in chosen)
    return {token: weights[token] / total for token in chosen}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_k of all": {"top_k": 99},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "all of them": {"temperature": 1.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "top_p after top_k": {"top_k": 2, "top_p": 0.75},
    "top_p after min_p": {"min_p": 0.3, "top_p": 0.75},
    "top_k after min_p": {"min_p": 0.3, "top_k": 2},
    "min_p, hot": {"temperature": 2.5, "min_p": 0.3},
}
LOGITS = [0.3, 2.0, -1.0, 1.5, 0.0, 1.5, -2.0, 0.9]
# Chi-square that one in ten thousand exceeds, by degrees of freedom.
CRITICAL = {0: 0.0, 1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_over_five_thousand_seeds_are_those_of_the_kept_set(name: str) -> None:
    want, tokens = kept(LOGITS, **SETTINGS[name]), draws_of(LOGITS, 5000, **SETTINGS[name])
    assert set(tokens) <= set(want)
    expected = {token: 5000 * share for token, share in want.items()}
    assert all(count > 5 for count in expected.values()), "a row of logits that this test cannot judge"
    chi_square = sum((tokens.count(token) - count) ** 2 / count for token, count in expected.items())
    assert chi_square <= CRITICAL[len(want) - 1] + 1e-9


def test_top_k_of_one_is_greedy_and_ties_stay_with_the_lowest() -> None:
    assert set(draws_of([1.0, 3.0, 3.0, 2.0], 50, top_k=1)) == {1}
    assert set(draws_of([1.0, 3.0, 3.0, 2.0], 200, top_k=2)) == {1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 5e-324])
def test_a_vanishing_temperature_draws_the_most_probable_token(temperature: float) -> None:
    assert set(draws_of([1.0, -2.0, 3.0, 2.5], 50, temperature=temperature)) == {2}
    assert set(draws_of([-1.0, -2.0, -3.0], 50, temperature=temperature)) == {0}


def test_a_boundless_temperature_draws_every_token_alike() -> None:
    tokens = draws_of([50.0, -50.0], 2000, temperature=1e300)
    assert 880 < tokens.count(0) < 1120  # 5 sigma of a fair coin


@pytest.mark.parametrize("name", SETTINGS)
def test_a_draw_does_not_depend_on_its_row_or_its_neighbours(name: str) -> None:
    logits, settings = logits_of(40, 311), SETTINGS[name]
    draws = [Draw(Sampling(**settings, seed=row), 10 + row) for row in range(40)]
    whole, _ = sample(logits, draws)
    for row in (0, 1, 17, 39):
        assert sample(logits[row : row + 1], [draws[row]])[0] == [whole[row]]
    assert sample(logits.flip(0), draws[::-1])[0] == whole[::-1]


def test_another_position_or_seed_is_another_draw() -> None:
    rows = torch.zeros(200, 50)
    by_position, _ = sample(rows, [Draw(Sampling(seed=1), position) for position in range(200)])
    by_seed, _ = sample(rows, [Draw(Sampling(seed=seed), 1) for seed in range(200)])
    assert len(set(by_position)) > 40 and len(set(by_seed)) > 40 and by_position != by_seed


def test_greedy_and_sampled_rows_stand_in_one_batch() -> None:
    logits = logits_of(2, 60)
    mixed, _ = sample(logits, [Draw(GREEDY, 1), Draw(Sampling(seed=9), 1)])
    assert mixed[0] == max(range(60), key=logits[0].tolist().__getitem__)
    assert mixed[1] == sample(logits[1:], [Draw(Sampling(seed=9), 1)])[0][0]
