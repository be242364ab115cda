"""Distributions of lengths: what they mean, and what is refused."""

from random import Random
from statistics import fmean, median

import pytest

from pegahpc.bench.lengths import parse_lengths
from pegahpc.config import ConfigError

OPTION = "--input-tokens"


def drawn(text: str, num: int = 20000) -> list[int]:
    rng = Random(1)
    return [parse_lengths(OPTION, text).draw(rng) for _ in range(num)]


def test_a_plain_number_is_every_length() -> None:
    assert set(drawn("128", 50)) == {128} == set(drawn("constant:value=128", 50))


def test_uniform_has_both_ends_and_nothing_beyond() -> None:
    lengths = drawn("uniform:low=3,high=6")
    assert set(lengths) == {3, 4, 5, 6}
    assert min(lengths.count(length) for length in (3, 4, 5, 6)) > 4700  # 5,000 each, sigma 61


def test_lognormal_has_the_mean_that_is_written_and_the_median_that_follows_from_it() -> None:
    lengths = drawn("lognormal:mean=512,sigma=0.6")
    assert fmean(lengths) == pytest.approx(512, rel=0.02)
    assert median(lengths) == pytest.approx(427.6, rel=0.02)  # 512 * exp(-0.18)


def test_geometric_has_its_mean_and_its_share_of_ones() -> None:
    lengths = drawn("geometric:mean=4")
    assert fmean(lengths) == pytest.approx(4, rel=0.02)
    assert lengths.count(1) / len(lengths) == pytest.approx(0.25, abs=0.01)
    assert set(drawn("geometric:mean=1", 50)) == {1}


def test_what_is_drawn_outside_of_the_bounds_becomes_the_bound() -> None:
    lengths = drawn("lognormal:mean=100,sigma=1,min=50,max=150")
    assert (min(lengths), max(lengths)) == (50, 150)
    assert lengths.count(150) > 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "are 1 or more"),
        ("many", "'many' is no number"),
        ("zipf:s=1", "'zipf' is none of constant, uniform"),
        ("uniform:low=3", "uniform needs high"),
        ("uniform:low=6,high=3", "upper bound is below"),
        ("uniform:low=0,high=3", "are 1 or more"),
        ("lognormal:mean=5,sigma=-1", "sigma is negative"),
        ("lognormal:mean=5,sigma=1,max=3,min=4", "upper bound is below"),
        ("lognormal:mean=inf,sigma=1", "mean is not finite"),
        ("geometric:mean=0.5", "are 1 or more"),
        ("geometric:mean=5,sigma=1", "geometric takes mean, min, max, not 'sigma'"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused_by_its_option(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^--input-tokens: ") as refused:
        parse_lengths(OPTION, text)
    assert says in str(refused.value)
