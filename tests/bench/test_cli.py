"""The commands as users type them: what they teach, refuse, print, and how they end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner
from typer.testing import Result as Ran

from pegahpc.bench.result import raw_bytes, write_result
from pegahpc.bench.tables import result_table
from pegahpc.config import ConfigError
from pegahpc.launch.bench import app
from tests.bench.made import records_of, result_of

PNG = b"\x89PNG\r\n\x1a\n"


def typed(*arguments: str) -> Ran:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def results(tmp_path: Path) -> tuple[str, str]:
    """The same run at 20 and at 10 ms a token."""
    paths = []
    for name, itl_ms in (("a", 20.0), ("b", 10.0)):
        records = [*records_of(itl_ms), *records_of(itl_ms * 2, point="c4")]
        path = tmp_path / f"{name}.json"
        write_result(path, result_of(records, name=path.name), raw_bytes(records))
        paths.append(str(path))
    return paths[0], paths[1]


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["show"]])
def test_every_command_teaches(command: list[str]) -> None:
    ran = typed(*command, "--help")
    assert ran.exit_code == 0
    if command == ["run"]:
        assert "lognormal:mean=512,sigma=0.6" in ran.output and "pegahpc bench run -c 1,8,32" in ran.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "localhost:8000"], "--url: 'localhost:8000' must begin with http"),
        (["--url", "http://me:key@host/v1"], "--url: a password has no place in a result"),
        (["--url", "http://h/v1", "--wire"], "--url, --wire, --engine: choose one"),
        (["engine.dtype=float32"], "engine.dtype=float32: overrides configure an engine that is built here"),
        (["--engine", "topology=ep2"], "topology: --engine builds one rank in this process, not 2"),
        (["--engine", "--prompts", "chat"], "--prompts: chat needs the text of HTTP"),
        (["--url", "http://h/v1", "--prompts", "tokens"], "--prompts: token ids need the model's vocabulary"),
        (["--engine", "--repeats", "0"], "--repeats: must be at least 1"),
        (["--engine", "--max-failures", "1"], "--max-failures: must be a share"),
        (["--engine", "--prompts", "words"], "--prompts: must be auto, tokens, text, chat"),
        (["--engine", "--slo", "ttft=5"], "--slo: 'ttft=5' is no limit"),
        (["--engine", "--label", "x"], "--label: 'x' has no value"),
        (["--engine", "--shared-prefix", "x"], "--shared-prefix: 'x' is no length"),
        (
            ["--engine", "--shared-prefix", "8x0"],
            "--shared-prefix: a length is not negative, and there is at least one",
        ),
        (["--engine", "--turns", "2", "--think", "nan"], "--think: nan is no time"),
        (["--engine", "--turns", "2", "--think", "inf"], "--think: inf is no time"),
        (["--engine", "--think", "1"], "--think: is the time between --turns, of which there is one"),
        (["--engine", "--temperature", "inf"], "--temperature: must be finite"),
        (["--engine", "-o", "a.txt"], "--output: a.txt must end in .json"),
        (["--engine", "-o", "/nowhere/a.json"], "--output: /nowhere is no folder"),
        (["--engine", "engine.dtyp=float32"], "engine.dtyp"),
        (["--url", "http://h/v1", "--key-file", "/nowhere/key"], "--key-file: /nowhere/key cannot be read"),
        (["--home", "/nowhere", "--name", "x"], "fleet.name: no fleet 'x'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name_before_anything_starts(arguments: list[str], says: str) -> None:
    ran = typed("run", *arguments)
    assert isinstance(ran.exception, ConfigError) and says in str(ran.exception)


def test_an_unknown_option_is_refused() -> None:
    ran = typed("run", "--engine", "--concurency", "4")
    assert ran.exit_code == 2 and "--concurency" in ran.output


def test_an_endpoint_that_is_not_there_is_said_on_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = typed("run", "--url", "http://127.0.0.1:9/v1", "-o", str(tmp_path / "a.json"))
    assert ran.exit_code == 1
    assert "nothing was measured: http://127.0.0.1:9/v1/models: nobody answers" in ran.output + capfd.readouterr().err


def test_a_comparison_says_which_side_is_faster_and_that_it_may(results: tuple[str, str]) -> None:
    ran = typed("compare", *results)
    assert ran.exit_code == 0
    assert "directional comparison allowed" in ran.output
    row = next(line for line in ran.output.splitlines() if "c2" in line and "tpot_ms.p50" in line)
    assert "0.500" in row and "lower" in row


def test_a_comparison_without_a_claim_has_exit_status_one_and_its_reasons(results: tuple[str, str]) -> None:
    Path(results[1]).with_name("b.requests.jsonl").unlink()
    ran = typed("compare", *results)
    assert ran.exit_code == 1
    assert "no directional claim" in ran.output and "current_raw_requests_missing_or_changed" in ran.output
    document = json.loads(typed("compare", *results, "--json").output)
    assert document["claim_marker"] == "no directional claim"
    assert document["reasons"] == ["current_raw_requests_missing_or_changed"]


def test_the_table_of_a_result_has_a_column_a_point_and_its_marker(results: tuple[str, str]) -> None:
    ran = typed("show", results[0])
    assert ran.exit_code == 0
    lines = ran.output.splitlines()
    assert any("c2" in line and "c4" in line for line in lines) and any(line.count("stable") == 2 for line in lines)
    tpot = next(line for line in lines if "TPOT p50" in line)
    assert "20.2 ±1%" in tpot and "40.4 ±1%" in tpot
    assert "the server reports none" in ran.output


def test_what_cannot_be_compared_has_reasons_and_no_empty_table(results: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "c.json"
    records = records_of()
    write_result(other, result_of(records, asked="other", name=other.name), raw_bytes(records))
    ran = typed("compare", results[0], str(other))
    assert ran.exit_code == 1
    assert "no claim: requests_changed" in ran.output and "no ratios" in ran.output
    assert "baseline" not in ran.output and "a direction is given" not in ran.output


def test_where_some_repeats_have_bundled_tokens_the_gaps_of_all_are_shown() -> None:
    """Tokens are 20 ms apart; in the last repeat two come with the first event."""
    alone = records_of(jitter=0.0)
    bundled = [
        msgspec.structs.replace(r, event_tokens=[2, 1, 1, 1, 1], output_tokens=6) for r in alone if r.repeat == 2
    ]
    mixed = [r for r in alone if r.repeat < 2] + bundled
    rows = {
        str(label): str(value)
        for label, value in zip(*(column.cells for column in result_table(result_of(mixed)).columns), strict=True)
    }
    assert rows["chunk gap p50, ms"] == "20 ±0%" and "ITL p50, ms" not in rows


def test_plots_are_pictures_beside_the_result(results: tuple[str, str]) -> None:
    assert typed("show", results[0], "--plot").exit_code == 0
    for name in ("a.cdf.png", "a.curve.png"):
        data = Path(results[0]).with_name(name).read_bytes()
        assert data.startswith(PNG) and len(data) > 10_000


def test_plots_without_matplotlib_are_refused_by_the_extra_that_has_it(
    results: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    for arguments in (["show", results[0], "--plot"], ["run", "--engine", "--plot"]):
        ran = typed(*arguments)
        assert isinstance(ran.exception, ConfigError) and "pip install 'pegahpc[bench]'" in str(ran.exception)
