"""Points of load: arrivals in the open loop, keys, and which options go together."""

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest

from pegahpc.bench.points import Closed, Open, Replay, make_points
from pegahpc.config import ConfigError


def gaps(point: Open) -> list[float]:
    arrivals = [0.0, *point.arrivals_s(Random(3), 20000)]
    return [later - sooner for sooner, later in pairwise(arrivals)]


@pytest.mark.parametrize(("shape", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_shape(shape: float, variation: float) -> None:
    """A gamma distribution of shape k has the coefficient of variation 1 / sqrt(k); 1 is the Poisson process's."""
    found = gaps(Open(8.0, shape))
    assert fmean(found) == pytest.approx(1 / 8, rel=0.04)
    assert pstdev(found) / fmean(found) == pytest.approx(variation, rel=0.05)


def test_options_make_points_with_keys() -> None:
    points = make_points("1,8", "0.5,4", shape=0.5, speed=None, has_trace=False)
    assert [point.key for point in points] == ["c1", "c8", "r0.5-g0.5", "r4-g0.5"]
    assert make_points(None, None, shape=1, speed=None, has_trace=False) == [Closed(8)]
    assert make_points(None, None, shape=1, speed=2.0, has_trace=True) == [Replay(2.0)]
    assert Replay(2.0).key == "trace-x2" and Replay().key == "trace"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"concurrency": "0"}, "--concurrency: 0 is not above 0"),
        ({"concurrency": "1.5"}, "--concurrency: '1.5' is no number"),
        ({"concurrency": "4,4"}, "the point c4 is there twice"),
        ({"rate": "inf"}, "--rate: inf is not above 0 and finite"),
        ({"rate": "1", "shape": 0.0}, "--gamma-shape: 0 is not above 0"),
        ({"shape": 2.0}, "shapes the gaps of --rate, which is not given"),
        ({"speed": 2.0}, "--speed: "),
        ({"speed": 2.0, "has_trace": True, "rate": "1"}, "--speed: "),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], says: str) -> None:
    defaults: dict[str, Any] = {"concurrency": None, "rate": None, "shape": 1.0, "speed": None, "has_trace": False}
    with pytest.raises(ConfigError) as refused:
        make_points(**(defaults | given))
    assert says in str(refused.value)
