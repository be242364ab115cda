"""The shipped model itself: an engine in this process, and a whole fleet over HTTP and over its ranks' wire."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegahpc.bench.command import run
from pegahpc.bench.compare import compare_files
from pegahpc.bench.options import RunOptions
from pegahpc.bench.ready import InProcess
from pegahpc.bench.result import Result, read_raw
from pegahpc.bench.run import Watcher
from pegahpc.config import compose_fleet
from pegahpc.launch.children import python_module
from pegahpc.plan import resolve
from tests.fleet.live_fleet import LiveFleet

NUM_REQUESTS, NUM_TOKENS = 6, 12
CODE = "code=as tested"  # counts only where no repository and no wheel tells


def options(output: Path, **given: Any) -> RunOptions:
    """Six requests of twelve tokens, twice."""
    small: dict[str, Any] = {"num_requests": NUM_REQUESTS, "output_tokens": str(NUM_TOKENS), "repeats": 2, "warmup": 1}
    small |= {"input_tokens": "uniform:low=20,high=60", "concurrency": "3", "output": output, "labels": [CODE]}
    return RunOptions(**(small | given))


def engine_run(output: Path, **given: Any) -> Result:
    plan = resolve(compose_fleet(["topology=ep1", "cluster.device=cpu"]))
    return run(options(output, **given), InProcess(plan), Watcher())[1]


def test_an_engine_is_measured_token_by_token_without_http(tmp_path: Path) -> None:
    result = engine_run(tmp_path / "a.json", rate="50", slo="ttft=60s,tpot=60s")
    assert [cell.key for cell in result.cells] == ["c3", "r50"]
    for cell in result.cells:
        for repeat, load in zip(cell.repeats, cell.experts, strict=True):
            assert repeat.failures == {} and repeat.unexplained_cached_tokens == 0
            assert repeat.num_uncounted == repeat.num_bundled == 0
            assert repeat.output_tokens == NUM_REQUESTS * NUM_TOKENS and repeat.cached_tokens == 0
            assert repeat.itl_ms is not None and repeat.itl_ms.count == NUM_REQUESTS * (NUM_TOKENS - 1)
            assert repeat.goodput_share == 1
            assert load is not None and [layer.layer for layer in load.layers] == [1, 2, 3, 4, 5]
            num_rows = repeat.input_tokens + NUM_REQUESTS * (NUM_TOKENS - 1)  # an answer's last token is no row
            assert {layer.rows for layer in load.layers} == {4 * num_rows}  # four experts a row
            assert load.distinct_experts is not None and 4 <= load.distinct_experts <= 16 and load.imbalance > 1
    assert result.num_devices == 1 and result.server["kind"] == "engine"
    assert not [reason for reason in result.no_claim if "provenance" in reason]


def test_the_same_seed_asks_the_same_and_gets_the_same_answers(tmp_path: Path) -> None:
    runs = [engine_run(tmp_path / f"{name}.json", concurrency="2").cells[0].repeats for name in "ab"]
    answers = [[repeat.outputs_sha256 for repeat in repeats] for repeats in runs]
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]
    comparison = compare_files(tmp_path / "a.json", tmp_path / "b.json")
    assert comparison.unlike == [] and comparison.subjects == []


def test_the_turns_of_a_conversation_find_their_history_in_the_prefix_cache(tmp_path: Path) -> None:
    result = engine_run(tmp_path / "a.json", turns=3, input_tokens="40", concurrency="1", shared_prefix="32")
    records = read_raw(tmp_path / "a.json", result)
    assert records is not None and all(record.failure is None for record in records)
    for record in (record for record in records if record.turn):
        assert record.reusable_tokens is not None and record.cached_tokens is not None
        assert record.reusable_tokens - 32 < record.cached_tokens <= record.reusable_tokens  # pages of 16
    assert result.cells[0].repeats[0].unexplained_cached_tokens == 0


def test_prompts_that_an_engine_has_seen_are_found_out(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    prompt = [10 + number for number in range(64)]
    trace.write_text("".join(json.dumps({"timestamp": at, "prompt": prompt}) + "\n" for at in (0.0, 0.3)))
    given: dict[str, Any] = {"trace": trace, "num_requests": None, "concurrency": None, "repeats": 2}
    result = engine_run(tmp_path / "a.json", allow_identical_prompts=True, **given)
    assert "identical_prompts:3" in result.no_claim
    assert result.cells[0].repeats[1].cached_tokens == 2 * 48  # 64 tokens are four pages; the last one is computed


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LiveFleet]:
    (tmp_path / "home").mkdir()
    live = LiveFleet(tmp_path / "home", "topology=ep2")
    yield live
    live.end()


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [*python_module("pegahpc.launch.cli"), "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


@pytest.mark.slow
def test_a_fleet_is_measured_over_http_and_over_its_wire_and_the_two_are_compared(
    fleet: LiveFleet, tmp_path: Path
) -> None:
    fleet.when_ready()
    small = ["--home", str(tmp_path / "home"), "-n", "4", "-t", "8", "-i", "40", "-c", "4", "--warmup", "1"]
    small += ["--label", CODE]
    paths = {"http": tmp_path / "http.json", "wire": tmp_path / "wire.json"}
    for number, (name, path) in enumerate(paths.items()):
        way = ["--wire"] if name == "wire" else ["--plot"]
        ran = typed("run", *small, *way, "--seed", str(number), "-o", str(path))
        assert ran.returncode == 0, ran.stderr
        assert "tiny-moe over" in ran.stdout and "output tokens/s a rank of 2" in ran.stdout
    assert (tmp_path / "http.cdf.png").exists()
    http, wire = (json.loads(path.read_text()) for path in paths.values())
    assert (http["server"]["kind"], wire["server"]["kind"], http["num_devices"]) == ("fleet", "wire", 2)
    assert http["server"]["config"]["topology"]["ep_size"] == 2
    assert "pega-" not in paths["http"].read_text()  # no key in a result
    for repeat, load in zip(http["cells"][0]["repeats"], http["cells"][0]["experts"], strict=True):
        assert {layer["rows"] for layer in load["layers"]} == {4 * (repeat["input_tokens"] + 4 * 7)}
    assert not [reason for reason in http["no_claim"] if "provenance" in reason or "warm" in reason]
    for document in (http, wire):
        repeats = document["cells"][0]["repeats"]
        assert [(repeat["num_succeeded"], repeat["output_tokens"]) for repeat in repeats] == [(4, 32)] * 3
    alike = {"num_requests": 4, "output_tokens": "8", "input_tokens": "40", "concurrency": "4", "repeats": 3, "seed": 1}
    engine_run(tmp_path / "engine.json", **alike)
    comparison = compare_files(paths["wire"], tmp_path / "engine.json")  # the same seed: the same requests
    assert comparison.unlike == [] and comparison.rows and comparison.subjects[0] == "kind: wire -> engine"
    engine = json.loads((tmp_path / "engine.json").read_text())
    answers = [[repeat["outputs_sha256"] for repeat in each["cells"][0]["repeats"]] for each in (wire, engine)]
    assert answers[0] == answers[1]  # and the same answers, on two ranks and on one
    ran = typed("compare", *map(str, paths.values()))
    assert ran.returncode == 1 and "workload_changed:seed" in ran.stdout  # other seeds: unlike
    ran = typed("run", *small, "--repeats", "1", "-o", str(tmp_path / "again.json"))
    assert "prefix_cache_was_warm:c4" in ran.stdout  # the same prompts to the same fleet
