"""`pegahpc bench run` against an endpoint of known timing: what is found out, measured, written, marked and refused."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pegahpc.bench.command import run
from pegahpc.bench.compare import compare_files
from pegahpc.bench.endpoint import PROBE_TOKENS, Unusable
from pegahpc.bench.options import RunOptions
from pegahpc.bench.ready import OverHttp
from pegahpc.bench.records import Record
from pegahpc.bench.result import Result, follows_from_raw, read_raw, read_result
from pegahpc.bench.run import Watcher
from pegahpc.config import ConfigError
from pegahpc.launch.children import python_module
from tests.bench.fake_endpoint import Act, FakeEndpoint
from tests.bench.test_experts import AFTER, BEFORE
from tests.bench.test_provenance import fleet as known_fleet

LABELS = ("code=somebody-1.0", "config=--fast", "model=rev7", "hardware=8xH200")


@pytest.fixture
async def fake() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serving() as endpoint:
        yield endpoint


async def bench(fake: FakeEndpoint, folder: Path, *, name: str = "a", model: str | None = None, **given: Any) -> Result:
    """Six short requests, one repeat."""
    small: dict[str, Any] = {"num_requests": 6, "input_tokens": "8", "output_tokens": "4", "concurrency": "3"}
    small |= {"repeats": 1, "warmup": 2, "vocab_size": 300, "stall_s": 0.5, "timeout_s": 3.0}
    small |= {"output": folder / f"{name}.json", **given}
    options = RunOptions(**small)
    subject = OverHttp(url=fake.url, api_key=None, model=model)
    path, result = await asyncio.to_thread(run, options, subject, Watcher())
    assert read_result(path) == result
    return result


async def test_a_run_is_written_with_its_conditions_and_its_requests(fake: FakeEndpoint, tmp_path: Path) -> None:
    result = await bench(fake, tmp_path, labels=LABELS, num_gpus=8, repeats=3, seed=5, rate="40")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.requests.jsonl"}
    assert [cell.key for cell in result.cells] == ["c3", "r40"] and result.raw.num_requests == 2 * 3 * 6
    records = read_raw(tmp_path / "a.json", result)
    assert records is not None and follows_from_raw(result, records)
    assert result.workload["seed"] == 5 and result.num_devices == 8
    assert result.server["hardware"] == "8xH200" and result.server["code"] == "somebody-1.0"
    assert {"command", "date", "code", "hardware", "versions", "load_average"} <= result.client.keys()
    assert not [reason for reason in result.no_claim if reason.startswith("provenance_missing")]
    document = json.loads((tmp_path / "a.json").read_text())
    assert list(document) == sorted(document) and document["schema_version"] == 1


async def test_figures_a_device_count_every_device(fake: FakeEndpoint, tmp_path: Path) -> None:
    (cell,) = (await bench(fake, tmp_path, num_gpus=8)).cells
    whole = cell.summary["output_tokens_per_s"].median
    assert cell.summary["output_tokens_per_s_per_device"].median == pytest.approx(whole / 8, rel=1e-3)
    assert "output_tokens_per_s_per_device" not in (await bench(fake, tmp_path)).cells[0].summary


async def test_a_fleet_of_ours_says_itself_how_many_ranks_it_has(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.card = {"id": "fake", "owned_by": "pegahpc", "max_model_len": 100}
    assert (await bench(fake, tmp_path)).num_devices == 2
    with pytest.raises(ConfigError, match="--num-gpus: 1 is not the 2 ranks that serve; all of them count"):
        await bench(fake, tmp_path, num_gpus=1)


async def test_of_an_endpoint_that_is_not_ours_no_claim_is_made_without_labels(
    fake: FakeEndpoint, tmp_path: Path
) -> None:
    result = await bench(fake, tmp_path, labels=["code=x"])
    missing = [f"provenance_missing:{name}" for name in ("config", "model", "hardware")]
    assert result.no_claim[:3] == missing and "no claim" in result.headline
    path = tmp_path / "a.json"
    assert "baseline_provenance_missing:hardware" in compare_files(path, path).reasons


async def test_of_a_fleet_of_ours_what_is_not_known_is_refused_until_a_label_says_it(
    fake: FakeEndpoint, tmp_path: Path
) -> None:
    stranger = known_fleet(source="other", url=fake.url)  # it runs other code, on another host
    options = RunOptions(num_requests=2, repeats=1, output_tokens="2", output=tmp_path / "a.json")
    subject = OverHttp(url=fake.url, api_key=None, model=None, fleet=stranger)
    with pytest.raises(
        ConfigError, match=r"^--label: numbers without provenance are refused\. Missing: code .*hardware"
    ):
        await asyncio.to_thread(run, options, subject, Watcher())
    assert list(tmp_path.iterdir()) == []
    labelled = replace(options, labels=["code=abc", "hardware=2xH200"])
    _, result = await asyncio.to_thread(run, labelled, subject, Watcher())
    assert (result.server["code"], result.num_devices, result.server["device"]) == ("abc", 2, "cuda")


async def test_the_warm_up_is_sent_and_not_counted(fake: FakeEndpoint, tmp_path: Path) -> None:
    result = await bench(fake, tmp_path, warmup=5)
    lengths = [body["max_tokens"] for body in fake.bodies]
    assert lengths.count(PROBE_TOKENS) == len(lengths) - 5 - 6
    assert result.raw.num_requests == 6 == result.cells[0].repeats[0].num_requests
    assert result.cells[0].repeats[0].output_tokens == 6 * 4


async def test_fields_that_the_endpoint_refuses_are_left_out(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.refuses = ("continuous_usage_stats", "min_tokens")
    assert (await bench(fake, tmp_path)).server["honoured"] == ["ignore_eos"]
    assert "min_tokens" not in fake.bodies[-1] and fake.bodies[-1]["ignore_eos"] is True


async def test_counts_in_each_event_are_used_only_where_they_come(fake: FakeEndpoint, tmp_path: Path) -> None:
    assert (await bench(fake, tmp_path)).server["honoured"] == ["ignore_eos", "min_tokens"]
    fake.has_counts = True
    assert "continuous_usage_stats" in (await bench(fake, tmp_path)).server["honoured"]


async def test_without_ignore_eos_lengths_must_be_given_up_by_name(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.refuses = ("ignore_eos", "min_tokens", "continuous_usage_stats")
    with pytest.raises(ConfigError, match="--stop-at-eos: the endpoint refuses ignore_eos"):
        await bench(fake, tmp_path)
    result = await bench(fake, tmp_path, stop_at_eos=True)
    assert result.workload["ignore_eos"] is False and result.server["honoured"] == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"has_usage": False}, "usage_wrong: the stream ended without usage"),
        ({"acts": lambda number: Act(status=401)}, "http_401"),
        ({"acts": lambda number: Act("truncated")}, "truncated"),
        ({"refuses": ("prompt",)}, "http_400: .*prompt: is not supported"),
        ({"acts": lambda number: Act(wait_s=30.0)}, "a first request was not answered within 3 s"),
    ],
)
async def test_an_endpoint_that_cannot_be_measured_is_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    async with FakeEndpoint(**given).serving() as fake:
        with pytest.raises(Unusable, match=says):
            await bench(fake, tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_warm_up_that_fails_ends_the_run(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.acts = lambda number: Act(status=500) if number >= 2 else Act()  # the probe needs two
    with pytest.raises(Unusable, match="the warm-up of c3 failed: http_500"):
        await bench(fake, tmp_path, warmup=2)


async def test_failures_lead_the_headline_and_are_listed_by_reason(fake: FakeEndpoint, tmp_path: Path) -> None:
    bad = {6: Act(status=429), 7: Act("short"), 8: Act(status=429)}
    fake.acts = lambda number: bad.get(number % 10, Act())  # a run: two to probe, two to warm up, six
    result = await bench(fake, tmp_path, labels=LABELS)
    assert result.headline.startswith("3 of 6 requests FAILED (http_429 2, short_output 1)")
    assert result.cells[0].marker == "failed_or_timeout" and "failures:c3" in result.no_claim
    allowed = await bench(fake, tmp_path, max_failures=0.5)
    assert allowed.cells[0].marker == "insufficient_repeats" and "failures:c3" in allowed.no_claim


async def test_prompts_that_do_not_fit_the_context_are_refused_before_they_are_sent(
    fake: FakeEndpoint, tmp_path: Path
) -> None:
    fake.card |= {"max_model_len": 11}
    with pytest.raises(ConfigError, match=r"request 0 needs 12 tokens with its answer, the model's context is 11"):
        await bench(fake, tmp_path)
    assert {body["max_tokens"] for body in fake.bodies} == {PROBE_TOKENS}


async def test_one_of_several_models_must_be_named(fake: FakeEndpoint, tmp_path: Path) -> None:
    assert (await bench(fake, tmp_path, model="fake")).server["model_name"] == "fake"
    with pytest.raises(ConfigError, match="--model: 'other' is none of the endpoint's: fake"):
        await bench(fake, tmp_path, model="other")


async def test_identical_prompts_are_refused_and_mark_the_result_when_allowed(
    fake: FakeEndpoint, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": n / 100, "prompt": [5, 6, 7]}) + "\n" for n in range(4)))
    given: dict[str, Any] = {"trace": trace, "num_requests": None, "concurrency": None, "labels": LABELS}
    with pytest.raises(ConfigError, match="a prompt comes twice"):
        await bench(fake, tmp_path, **given)
    result = await bench(fake, tmp_path, allow_identical_prompts=True, **given)
    assert "identical_prompts:3" in result.no_claim and [cell.key for cell in result.cells] == ["trace"]


@pytest.mark.parametrize("again", [{"repeats": 2}, {"concurrency": "1,2"}])
async def test_a_trace_with_prompts_is_refused_a_second_time_before_it_is_asked_once(
    fake: FakeEndpoint, tmp_path: Path, again: dict[str, Any]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "prompt": [5, 6, 7]}\n{"timestamp": 1, "input_tokens": 4}\n')
    given: dict[str, Any] = {"trace": trace, "num_requests": None, "concurrency": None}
    with pytest.raises(ConfigError, match="--trace: has prompts, which can be asked once: say --repeats 1"):
        await bench(fake, tmp_path, **(given | again))
    assert fake.bodies == []


async def test_a_cache_that_knows_prompts_of_an_earlier_run_is_found_out(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.acts = lambda number: Act(cached=6)
    result = await bench(fake, tmp_path)
    assert result.cells[0].repeats[0].unexplained_cached_tokens == 36
    assert "prefix_cache_was_warm:c3" in result.no_claim
    fresh = await bench(fake, tmp_path, shared_prefix="6")
    assert fresh.cells[0].repeats[0].unexplained_cached_tokens == 0


async def test_expert_load_is_read_before_and_after_each_repeat(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.metrics = lambda number: BEFORE if number < 10 else AFTER  # two to probe, two to warm up, six
    (load,) = (await bench(fake, tmp_path)).cells[0].experts
    assert load is not None and (load.distinct_experts, load.imbalance) == (1.25, 1.75)
    fake.metrics = None
    assert (await bench(fake, tmp_path)).cells[0].experts == [None]


class Killer(Watcher):
    """Raises in the middle of a run."""

    def on_record(self, record: Record) -> None:
        if record.point == "c3" and record.conversation == 3:
            raise MemoryError("the machine is full")


async def test_a_run_that_breaks_writes_nothing(fake: FakeEndpoint, tmp_path: Path) -> None:
    options = RunOptions(num_requests=6, input_tokens="8", output_tokens="4", concurrency="3", repeats=1,
                         vocab_size=300, output=tmp_path / "a.json")  # fmt: skip
    subject = OverHttp(url=fake.url, api_key=None, model=None)
    with pytest.raises(BaseExceptionGroup):
        await asyncio.to_thread(run, options, subject, Killer())
    assert list(tmp_path.iterdir()) == []


async def test_a_process_that_is_killed_in_the_middle_leaves_no_file(fake: FakeEndpoint, tmp_path: Path) -> None:
    command = [
        *python_module("pegahpc.launch.cli"),
        "bench",
        "run",
        "--url",
        fake.url,
        "--vocab-size",
        "300",
        "-i",
        "8",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, "-t", "8", "-n", "400", "-o", str(tmp_path / "a.json"), stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(60):
        while len(fake.bodies) < 20:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pegahpc.bench.result import raw_bytes, write_result
    from tests.bench.made import records_of, result_of

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match=r"--output: .* cannot be written: No space left"):
        write_result(tmp_path / "r.json", result_of(records_of()), raw_bytes(records_of()))
    assert list(tmp_path.iterdir()) == []
