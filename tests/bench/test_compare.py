"""What may be said of two results; every unlike pair is refused by a reason of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegahpc.bench.compare import compare, compare_files
from pegahpc.bench.result import Result, raw_bytes, read_raw, read_result, write_result
from pegahpc.config import ConfigError
from tests.bench.made import CODE, CONFIG, MACHINE, MODEL, records_of, result_of


def directions(comparison: Any, figure: str) -> list[tuple[float | None, str]]:
    return [(row.ratio, row.direction) for row in comparison.rows if row.figure == figure]


def test_of_two_clean_runs_a_direction_may_be_claimed() -> None:
    other = CODE | {"commit": "b" * 40}
    comparison = compare(result_of(records_of(20.0)), result_of(records_of(10.0), server={"code": other}))
    assert comparison.reasons == [] and comparison.claim_marker == "directional comparison allowed"
    assert directions(comparison, "tpot_ms.p50") == [(0.5, "lower")]
    assert directions(comparison, "ttft_ms.p50") == [(1.0, "no difference")]
    ((ratio, direction),) = directions(comparison, "output_tokens_per_s")
    assert direction == "higher"
    assert ratio == pytest.approx(180.8 / 140.4, abs=1e-3)  # five tokens in 100 + 4 * 20.2 ms, and 100 + 4 * 10.1
    assert comparison.subjects == [f"code: {'a' * 12} -> {'b' * 12}"]


def test_where_ranges_of_repeats_meet_there_is_no_difference() -> None:
    comparison = compare(result_of(records_of(20.0)), result_of(records_of(20.3)))
    assert comparison.reasons == []
    ((ratio, direction),) = directions(comparison, "tpot_ms.p50")
    assert direction == "no difference" and ratio == pytest.approx(1.015)


@pytest.mark.parametrize(
    ("server", "num_devices", "subjects"),
    [
        ({"kind": "engine"}, 1, ["kind: fleet -> engine"]),
        ({"config": CONFIG | {"engine": {"dtype": "bfloat16"}}}, 1, ["config.engine.dtype: float32 -> bfloat16"]),
        ({"config": CONFIG | {"topology": {"ep_size": 4}}}, 4, ["devices: 1 -> 4", "config.topology.ep_size: 1 -> 4"]),
        ({"versions": {"python": "3.11", "torch": "2.13", "pegahpc": "0.2"}}, 1, []),
        ({"hardware": MACHINE | {"host": "other"}}, 1, []),
    ],
)
def test_what_a_comparison_is_about_may_differ_and_is_named(
    server: dict[str, Any], num_devices: int, subjects: list[str]
) -> None:
    comparison = compare(result_of(records_of()), result_of(records_of(), server=server, num_devices=num_devices))
    assert comparison.reasons == [] and comparison.subjects == subjects


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"workload": {"seed": 1, "form": "tokens", "input_tokens": "128"}}, "workload_changed:seed"),
        ({"workload": {"seed": 0, "form": "text", "input_tokens": "128"}}, "workload_changed:form"),
        ({"workload": {"seed": 0, "form": "tokens"}}, "workload_changed:input_tokens"),
        ({"asked": "y"}, "requests_changed:c2"),
        ({"server": {"model": MODEL | {"fingerprint": "f2"}}}, "model_snapshot_changed:fingerprint"),
        ({"server": {"model": MODEL | {"tokenizer_sha256": "t2"}}}, "model_snapshot_changed:tokenizer_sha256"),
        ({"server": {"model": "a label"}}, "model_snapshot_changed:fingerprint"),
    ],
)
def test_two_results_that_did_not_measure_the_same_thing_get_no_ratios(given: dict[str, Any], reason: str) -> None:
    comparison = compare(result_of(records_of()), result_of(records_of(), **given))
    assert reason in comparison.unlike and reason in comparison.reasons
    assert comparison.rows == [] and comparison.claim_marker == "no directional claim"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"server": {"hardware": MACHINE | {"cpu": "EPYC"}}}, "hardware_changed:cpu"),
        ({"server": {"hardware": MACHINE | {"cores": 4}}}, "hardware_changed:cores"),
        ({"server": {"hardware": MACHINE | {"gpus": [{"name": "H200", "uuid": "u"}]}}}, "hardware_changed:gpus"),
        ({"server": {"hardware": "8xH200"}}, "hardware_changed"),
        ({"server": {"versions": {"python": "3.11", "torch": "2.12", "pegahpc": "0.1"}}}, "versions_changed:torch"),
        ({"server": {"hardware": None}}, "current_provenance_missing:hardware"),
        ({"server": {"code": None}}, "current_provenance_missing:code"),
        ({"server": {"code": CODE | {"is_dirty": True}}}, "current_code_is_dirty"),
        ({"num_devices": None}, "num_devices_unknown"),
        ({"num_identical_prompts": 3}, "current_identical_prompts:3"),
        ({"client": {"code": None}}, "current_provenance_missing:client_code"),
        ({"client": {"code": CODE | {"is_dirty": True}}}, "current_code_is_dirty"),
        ({"client_lag_ms": 21.0}, "current_client_was_slow:c2"),
        ({"slo": "ttft=1s"}, "slo_changed"),
    ],
)
def test_other_conditions_forbid_a_claim_and_leave_the_ratios(given: dict[str, Any], reason: str) -> None:
    comparison = compare(result_of(records_of()), result_of(records_of(), **given))
    assert reason in comparison.reasons and comparison.unlike == []
    assert comparison.rows and {row.direction for row in comparison.rows} == {"no claim"}


def test_a_noisy_cell_forbids_a_claim() -> None:
    comparison = compare(result_of(records_of(jitter=0.2)), result_of(records_of()))
    assert "baseline_noisy_cell:c2" in comparison.reasons


def test_too_few_repeats_forbid_a_claim() -> None:
    two = [record for record in records_of() if record.repeat < 2]
    assert "current_insufficient_repeats_cell:c2" in compare(result_of(records_of()), result_of(two)).reasons


def test_failures_forbid_a_claim_even_where_a_share_of_them_was_allowed() -> None:
    failed = [*records_of()[:-1], msgspec.structs.replace(records_of()[-1], failure="http_429")]
    strict = compare(result_of(records_of()), result_of(failed))
    assert {"current_failures:c2", "current_failed_or_timeout_cell:c2"} <= set(strict.reasons)
    lenient = compare(result_of(records_of()), result_of(failed, max_failures=0.5))
    assert "current_failures:c2" in lenient.reasons


def test_a_cache_that_was_warm_forbids_a_claim() -> None:
    warm = result_of(records_of(cached_tokens=8, reusable_tokens=0))
    assert "current_prefix_cache_was_warm:c2" in compare(result_of(records_of()), warm).reasons


def test_points_of_one_side_alone_are_named() -> None:
    more = result_of([*records_of(), *records_of(point="c8")])
    assert compare(result_of(records_of()), more).reasons == ["cell_added:c8"]
    assert compare(more, result_of(records_of())).reasons == ["cell_missing:c8"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path / "r.json", result_of(records_of()))


def write(path: Path, result: Result) -> Path:
    write_result(path, result, raw_bytes(records_of()))
    return path


def test_a_result_that_was_written_is_read_as_it_was(written: Path) -> None:
    result = read_result(written)
    assert result == result_of(records_of())
    assert read_raw(written, result) == records_of()
    assert compare_files(written, written).reasons == []


def test_raw_requests_that_are_gone_or_changed_forbid_a_claim(written: Path) -> None:
    raw = written.with_name("r.requests.jsonl")
    raw.write_bytes(raw.read_bytes().replace(b'"repeat":0', b'"repeat":1'))
    reasons = ["baseline_raw_requests_missing_or_changed", "current_raw_requests_missing_or_changed"]
    assert compare_files(written, written).reasons == reasons
    raw.unlink()
    assert compare_files(written, written).reasons == reasons


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cells", 0, "repeats", 1, "tpot_ms", "p50"), 1.0),
        (("cells", 0, "repeats", 1, "output_tokens_per_s"), 1e6),
        (("cells", 0, "summary", "output_tokens_per_s", "median"), 1e6),
        (("cells", 0, "marker"), "noisy"),
        (("no_claim",), ["code_is_dirty"]),
        (("headline",), "the fastest ever"),
        (("num_devices",), 8),
    ],
)
def test_what_was_written_by_hand_does_not_follow_from_the_raw_requests(
    written: Path, place: tuple[str | int, ...], value: object
) -> None:
    document = inner = msgspec.json.decode(written.read_bytes())
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    written.write_bytes(msgspec.json.encode(document))
    assert "current_figures_do_not_follow_from_raw_requests" in compare_files(written, written).reasons


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is no result of"),
        (b'{"kind": "other"}', "is no result of"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        compare_files(path, path)
    assert says in str(refused.value)


def test_a_result_of_another_schema_is_refused(written: Path) -> None:
    document = msgspec.json.decode(written.read_bytes()) | {"schema_version": 99}
    written.write_bytes(msgspec.json.encode(document))
    with pytest.raises(ConfigError, match="has schema version 99, this pegahpc reads 1"):
        read_result(written)
