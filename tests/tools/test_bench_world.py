"""The measured worlds run: what `make bench` prints is taken from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_provenance import provenance
from bench_world import EngineWorld, measure_exchange

TINY_MOE = Path(__file__).parents[2] / "assets" / "tiny-moe"

pytestmark = pytest.mark.slow


def test_an_exchange_is_measured_over_both_transports() -> None:
    figures = measure_exchange(TINY_MOE, num_bytes=64 << 10, repeats=10, rounds=1)
    assert set(figures) == {"fabric_us", "gloo_us", "fabric_layer_us", "gloo_layer_us"}
    assert figures["fabric_us"] < figures["gloo_us"]


def test_a_world_of_engines_runs_again_and_again() -> None:
    with EngineWorld(TINY_MOE, 2) as world:
        assert all(world.run(requests, 6) > 0 for requests in ([1, 0], [2, 3], [0, 1]))


def test_figures_carry_their_conditions() -> None:
    assert {"date", "commit", "command", "cpu", "cores", "load_average", "torch", "x"} <= set(provenance(x="1"))
