"""The layout's own rules: one import package, no name of ours in anyone's way."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("moe", "mla", "kernels", "launch", "slurm", "conf")


def test_each_part_is_linked_into_the_package() -> None:
    for part in PARTS:
        link = ROOT / "pegahpc" / part
        assert link.is_symlink() and link.readlink() == Path("..") / part


def test_no_part_but_conf_is_importable_under_its_short_name() -> None:
    assert [part for part in PARTS if (ROOT / part / "__init__.py").exists()] == ["conf"]


def test_the_type_checker_is_told_of_every_link() -> None:
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    code = {part for part in PARTS if any((ROOT / part).rglob("[!_]*.py"))}
    assert {f"pegahpc/{part}" for part in code} <= set(pyright["include"])


@pytest.mark.slow
def test_the_wheel_holds_one_top_level_name(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path,
            ROOT,
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pegahpc"}
    assert {"pegahpc/conf/config.yaml", "pegahpc/slurm/fleet.sbatch", "pegahpc/kernels/registry.py"} <= set(names)
