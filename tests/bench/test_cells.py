"""The marker of a point: what spread over repeats it may have, and what failed."""

from __future__ import annotations

import msgspec
import pytest

from pegahpc.bench.cells import Cell
from pegahpc.bench.records import Record
from tests.bench.made import records_of, result_of


def cell(records: list[Record], max_failures: float = 0.0) -> Cell:
    return result_of(records, max_failures=max_failures).cells[0]


def test_medians_and_spread_over_repeats_are_those_worked_out_by_hand() -> None:
    """Gaps of 20, 22 and 24 ms: median 22, spread 4 / 22."""
    summary = cell(records_of(20.0, jitter=0.1)).summary["tpot_ms.p50"]
    assert (summary.median, summary.min, summary.max) == (22.0, 20.0, 24.0)
    assert summary.spread_ratio == pytest.approx(4 / 22, abs=1e-6)


@pytest.mark.parametrize(("jitter", "marker"), [(0.045, "stable"), (0.06, "noisy")])
def test_a_spread_above_a_tenth_of_the_median_is_noise(jitter: float, marker: str) -> None:
    """(max - min) / median is 2 * jitter / (1 + jitter): 0.086 and 0.113."""
    found = cell(records_of(jitter=jitter))
    assert found.marker == marker
    assert found.noisy == ([] if marker == "stable" else ["tpot_ms.p95", "itl_ms.p95"])


def test_below_three_repeats_nothing_is_known_of_the_noise() -> None:
    assert cell([record for record in records_of() if record.repeat < 2]).marker == "insufficient_repeats"


def test_more_failures_than_allowed_are_the_marker() -> None:
    records = records_of()
    records[5] = msgspec.structs.replace(records[5], failure="stalled")
    assert cell(records).marker == "failed_or_timeout"
    assert cell(records, max_failures=0.25).marker == "noisy"  # the rate of that repeat is a quarter lower
    assert cell(records, max_failures=0.2).marker == "failed_or_timeout"  # a quarter of its repeat failed


def test_a_repeat_without_a_success_is_an_error_of_the_benchmark_even_where_failures_are_allowed() -> None:
    records = [msgspec.structs.replace(r, failure="http_429") if r.repeat == 1 else r for r in records_of()]
    assert cell(records, max_failures=0.99).marker == "failed_or_timeout"
    nothing = [msgspec.structs.replace(r, output_tokens=0, event_ms=[100.0]) for r in records_of()]
    assert cell(nothing).marker == "benchmark_error"
