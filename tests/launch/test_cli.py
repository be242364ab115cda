"""What the command line refuses, prints and costs, without a fleet."""

import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from pegahpc.launch.printing import complain
from tests.launch.conftest import Run

TINY = Path(__file__).parents[2] / "assets" / "tiny-moe"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "topology=ep3"], "topology/ep3"),
        (["plan", "topology.num_tray=3"], "num_tray"),
        (["up", "gateway.port=70000"], "gateway.port: 70000 is not in 0..65535"),
        (["up", "model.path=/nowhere"], "model.path: "),
        (["up", "--name", "../x"], "fleet.name: '../x' must be"),
        (["up", "--name", ""], "fleet.name: '' must be"),
        (["plan", "+gateway.prt=3"], "gateway.prt: keys are neither added"),
        (["up", "topology=ep32"], "topology.ep_size: 32 ranks do not divide 16 experts"),
        (["up", "cluster.interface=eth9"], "cluster.interface: 'eth9' is none of this machine's "),
        (["up", "engine.idle_wait_ms=9000"], "engine.idle_wait_ms: 9000 is above a quarter of gateway.stall_s"),
        *[
            ([command, "--name", "../x"], "fleet.name: '../x' must be 1 to 64 letters")
            for command in ("status", "logs", "url", "chat", "smoke", "down")
        ],
        (["status", "--name", ""], "fleet.name: '' must be"),
        (["status", "--name", "nobody"], "fleet.name: no fleet 'nobody' in "),
        (["url"], "fleet.name: no fleet 'pegahpc' in "),
        (["down", "--name", "nobody"], "fleet.name: no fleet 'nobody' in "),
    ],
)
def test_a_refusal_is_one_line_and_exit_status_two(
    pegahpc: Run, tmp_path: Path, arguments: list[str], says: str
) -> None:
    ran = pegahpc(arguments[0], "--home", str(tmp_path), *arguments[1:])
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("pegahpc: ") and says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert not (tmp_path / "fleets").exists()


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_home_that_cannot_be_written_is_refused_by_its_key(pegahpc: Run, tmp_path: Path, detach: list[str]) -> None:
    (tmp_path / "file").touch()
    ran = pegahpc("up", *detach, "--home", str(tmp_path / "file" / "home"), "gateway.port=0")
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"pegahpc: fleet.home: {tmp_path}/file/home cannot be written (Not a directory")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_port_that_is_taken_is_refused_before_anything_loads(pegahpc: Run, tmp_path: Path, detach: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = pegahpc("up", *detach, "--home", str(tmp_path), f"gateway.port={port}")
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"pegahpc: gateway.port: 127.0.0.1:{port} cannot be bound (Address already in use)")
    assert json.loads(pegahpc("ls", "--home", str(tmp_path), "--json").stdout) == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged"),
        ("chat_template.jinja", "{% if %}", "the chat template cannot be used"),
    ],
)
def test_text_files_that_the_gateway_cannot_use_are_refused_before_anything_loads(
    pegahpc: Run, tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / name).unlink(missing_ok=True)
    if content is not None:
        (model / name).write_text(content)
    ran = pegahpc("up", "--home", str(tmp_path / "home"), f"model.path={model}")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("pegahpc: model.path: ") and says in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert not (tmp_path / "home").exists()


def test_plan_shows_every_rank_with_its_experts_and_memory(pegahpc: Run) -> None:
    ran = pegahpc("plan", "topology=ep4")
    assert ran.returncode == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ran.stdout.splitlines() if line[:1] == "│"]
    assert [row[:4] for row in rows] == [
        ["0", "0", "cpu", "0..3"],
        ["1", "0", "cpu", "4..7"],
        ["2", "1", "cpu", "8..11"],
        ["3", "1", "cpu", "12..15"],
    ]
    assert all(cell.endswith(" MiB") for row in rows for cell in row[4:])


def test_plan_as_json_is_the_resolved_configuration(pegahpc: Run) -> None:
    document = json.loads(pegahpc("plan", "--json", "--name", "x", "topology=ep2").stdout)
    assert document["num_local_experts"] * 2 == document["num_experts"] == 16
    assert document["fleet"]["fleet"]["name"] == "x"
    assert "auto" not in document["fleet"]["engine"].values() and None not in document["fleet"]["engine"].values()


def test_an_empty_home_has_no_fleets(pegahpc: Run, tmp_path: Path) -> None:
    assert pegahpc("ls", "--home", str(tmp_path)).returncode == 0
    assert pegahpc("ls", "--home", str(tmp_path), "--json").stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["up", "plan", "ls", "status", "logs", "url", "chat", "smoke", "down"])
def test_every_command_explains_itself(pegahpc: Run, command: str) -> None:
    ran = pegahpc(command, "--help")
    assert ran.returncode == 0
    assert "--name" in ran.stdout or command == "ls"


def test_a_short_command_costs_less_than_twice_what_the_packages_under_it_do(pegahpc: Run, tmp_path: Path) -> None:
    """In processor time, a ratio in one run: on a busy machine both cost more. About 0.3 s on an idle one."""

    def least_s(run: Callable[[], object]) -> float:
        spent = [cpu_s()]
        for _ in range(3):
            run()
            spent.append(cpu_s())
        return min(after - before for before, after in pairwise(spent))

    def cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    packages = [sys.executable, "-P", "-c", "import hydra, typer, rich.table, msgspec"]
    assert least_s(lambda: pegahpc("ls", "--home", str(tmp_path))) < 2 * least_s(lambda: subprocess.run(packages))


@pytest.mark.parametrize("folder", ["a b", "a'b", 'a"b,c=d', "ümlaut", "${oc.env:HOME}", "[a]{b: c}"])
def test_a_home_is_taken_as_it_is_written(pegahpc: Run, tmp_path: Path, folder: str) -> None:
    ran = pegahpc("plan", "--json", "--home", str(tmp_path / folder))
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["fleet"]["fleet"]["home"] == str(tmp_path / folder)


def test_of_many_faults_the_first_and_their_number_are_said_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain("model.path: a is missing\nb is missing\n... and 22 more")
    said = "pegahpc: model.path: 24 faults, the first: a is missing"
    assert capsys.readouterr().err == f"{said} (pegahpc plan lists them)\n"
    complain("model.path: a is missing\nb is missing\n... and 22 more", is_whole=True)
    assert capsys.readouterr().err == f"{said}\n    b is missing\n    ... and 22 more\n"
