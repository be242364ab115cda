"""Figures against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegahpc.bench.cells import flatten
from pegahpc.bench.figures import Figures, Limits, figures, parse_limits, stats
from pegahpc.bench.records import Record
from pegahpc.config import ConfigError
from tests.bench.made import record


def of(*records: Record, limits: Limits | None = None, num_devices: int | None = None) -> Figures:
    return figures(records, limits=limits, num_devices=num_devices)


def parts(values: list[float]) -> tuple[float, ...]:
    found = stats(values)
    assert found is not None
    return found.count, found.mean, found.p50, found.p90, found.p95, found.p99, found.max


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        # the value at place (n - 1) * p, between neighbours in proportion; p90 of five stands at 3.6
        ([50.0, 15, 40, 20, 35], (5, 32.0, 35.0, 46.0, 48.0, 49.6, 50.0)),
        ([10.0, 20.0], (2, 15.0, 15.0, 19.0, 19.5, 19.9, 20.0)),
        ([7.0], (1, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0)),
        ([float(number) for number in range(101)], (101, 50.0, 50.0, 90.0, 95.0, 99.0, 100.0)),
    ],
)
def test_percentiles_interpolate_linearly(values: list[float], wanted: tuple[float, ...]) -> None:
    assert parts(values) == pytest.approx(wanted)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_those_of_the_formula(values: list[float]) -> None:
    ordered = sorted(values)
    for share, found in zip((0.5, 0.9, 0.95, 0.99), parts(values)[2:6], strict=True):
        place = (len(ordered) - 1) * share
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        assert found == pytest.approx(ordered[low] + (place - low) * (ordered[high] - ordered[low]), abs=1e-3)
        assert found == pytest.approx(float(np.percentile(values, share * 100, method="linear")), abs=1e-3)


def test_of_nothing_there_are_no_percentiles() -> None:
    assert stats([]) is None


def test_two_requests_by_hand() -> None:
    """The first: due at 0, tokens at 100, 120, 160 ms; the second: due at 50, sent at 60, tokens at 250 and 300."""
    first = record([100.0, 120.0, 160.0])
    second = record([250.0, 300.0], due_ms=50.0, sent_ms=60.0, input_tokens=30, ended_ms=310.0)
    found = flatten(of(first, second, num_devices=2))
    assert found["duration_s"] == 0.31
    assert (found["ttft_ms.p50"], found["ttft_ms.mean"]) == (150.0, 150.0)  # 100 and 200
    assert (found["tpot_ms.p50"], found["tpot_ms.max"]) == (40.0, 50.0)  # 30 and 50
    assert (found["itl_ms.mean"], found["itl_ms.max"]) == pytest.approx((110 / 3, 50.0), abs=1e-4)  # 20, 40, 50
    assert found["e2e_ms.max"] == 260.0
    assert found["send_lag_ms.max"] == 10.0
    assert found["requests_per_s"] == pytest.approx(2 / 0.31, abs=1e-4)
    assert found["output_tokens_per_s"] == pytest.approx(5 / 0.31, abs=1e-4)
    assert found["input_tokens_per_s"] == pytest.approx(40 / 0.31, abs=1e-4)
    assert found["output_tokens_per_s_per_device"] == pytest.approx(2.5 / 0.31, abs=1e-4)


def test_a_failure_takes_time_but_brings_no_token_and_no_latency() -> None:
    good, bad = record([100.0, 200.0]), record([5.0], ended_ms=1000.0, failure="stalled", output_tokens=1)
    found = of(good, bad)
    assert (found.num_requests, found.num_succeeded, found.failures) == (2, 1, {"stalled": 1})
    assert found.output_tokens_per_s == 2.0 and found.duration_s == 1.0
    assert found.ttft_ms is not None and (found.ttft_ms.count, found.ttft_ms.max) == (1, 100.0)


def test_where_all_fail_there_is_no_figure() -> None:
    found = of(record([5.0], failure="http_500"))
    assert found.ttft_ms is None and found.tpot_ms is None and found.output_tokens_per_s == 0


def test_without_the_number_of_devices_there_is_no_figure_a_device() -> None:
    assert of(record([1.0, 2.0])).output_tokens_per_s_per_device is None


def test_tpot_and_itl_are_withheld_when_one_stream_has_not_one_piece_a_token() -> None:
    found = of(record([10.0, 20.0]), record([10.0, 30.0], output_tokens=3))
    assert found.tpot_ms is None and found.itl_ms is None and (found.num_uncounted, found.num_bundled) == (1, 0)
    assert found.stream_chunk_gap_ms is not None and found.stream_chunk_gap_ms.max == 20.0


def test_tokens_that_come_bundled_have_a_tpot_and_no_itl() -> None:
    """Two tokens at 10 ms, one at 40, two at 70: three tokens came in the 60 ms after the first event."""
    found = of(record([10.0, 40.0, 70.0], event_tokens=[2, 1, 2], output_tokens=5))
    assert (found.num_uncounted, found.num_bundled) == (0, 1)
    assert found.tpot_ms is not None and found.tpot_ms.p50 == 20.0
    assert found.itl_ms is None and found.stream_chunk_gap_ms is not None and found.stream_chunk_gap_ms.p50 == 30.0
    one_by_one = of(record([10.0, 20.0], event_tokens=[1, 1]))
    assert one_by_one.num_bundled == 0 and one_by_one.itl_ms is not None


def test_an_answer_that_came_at_once_is_within_every_limit_of_tpot() -> None:
    assert of(record([10.0], event_tokens=[5], output_tokens=5), limits=parse_limits("tpot=1ms")).goodput_share == 1


def test_an_answer_of_one_token_has_no_tpot_and_takes_it_from_nobody() -> None:
    found = of(record([10.0]), record([10.0, 30.0]))
    assert found.tpot_ms is not None and (found.tpot_ms.count, found.tpot_ms.p50) == (1, 20.0)


def test_cached_tokens_beyond_what_the_run_itself_can_have_left_are_counted() -> None:
    warm = record([1.0], cached_tokens=48, reusable_tokens=16)
    assert of(warm, record([1.0], cached_tokens=8, reusable_tokens=16)).unexplained_cached_tokens == 32
    assert of(warm, record([1.0], reusable_tokens=None)).unexplained_cached_tokens is None
    assert of(warm).cached_tokens == 48 and of(record([1.0], cached_tokens=None)).cached_tokens is None


def test_goodput_counts_requests_within_all_limits() -> None:
    limits = parse_limits("ttft=100ms,tpot=30ms,e2e=0.5s")
    in_time, slow_start = record([100.0, 130.0]), record([101.0, 120.0])
    slow_tokens, late = record([100.0, 131.0]), record([100.0, 110.0], ended_ms=501.0)
    found = of(in_time, slow_start, slow_tokens, late, limits=limits)
    assert found.goodput_share == 0.25 and found.goodput_per_s == pytest.approx(1 / 0.501, abs=1e-4)
    alone = of(in_time, record([1.0], failure="timeout"), limits=limits)
    assert alone.goodput_share == 0.5  # a failure is not good


def test_goodput_is_not_known_where_a_time_is_not() -> None:
    limits, untimed = parse_limits("tpot=30ms"), record([10.0, 20.0], output_tokens=3)
    assert of(untimed, limits=limits).goodput_share is None
    assert of(untimed, limits=parse_limits("ttft=30ms")).goodput_share == 1
    assert of(record([10.0]), limits=limits).goodput_share == 1  # one token: nothing to wait for
    assert of(untimed).goodput_share is None


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "ttft=ms", "ttft=5min", "itl=5ms", "ttft=5ms;tpot=1ms", "=5ms"])
def test_a_limit_without_a_known_name_and_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--slo: "):
        parse_limits(text)
