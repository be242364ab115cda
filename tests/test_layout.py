"""The layout's own rules: one import package, no name of ours in anyone's way, and a wheel that holds all it needs."""

import hashlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("moe", "mla", "kernels", "launch", "slurm", "conf")
LINKS = (*PARTS, "assets")
WEIGHTS_SHA256 = "a3eeebe6077618cdd35001e9ca95b26720e3b1f670c117538a56e629a1726eeb"
ASSETS = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_each_part_is_linked_into_the_package() -> None:
    for part in LINKS:
        link = ROOT / "pegahpc" / part
        assert link.is_symlink() and link.readlink() == Path("..") / part


def test_no_part_but_conf_is_importable_under_its_short_name() -> None:
    assert [part for part in LINKS if (ROOT / part / "__init__.py").exists()] == ["conf"]


def test_the_type_checker_is_told_of_every_link() -> None:
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    code = {part for part in PARTS if any((ROOT / part).rglob("[!_]*.py"))}
    assert {f"pegahpc/{part}" for part in code} <= set(pyright["include"])


def test_the_linter_bans_every_short_name() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert set(PARTS) == set(lint["flake8-tidy-imports"]["banned-api"])


def test_the_shipped_model_is_the_documented_one_and_nothing_else() -> None:
    folder = ROOT / "assets" / "tiny-moe"
    assert {path.name for path in folder.iterdir()} == ASSETS
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256


@pytest.mark.slow
def test_the_wheel_holds_one_top_level_name_and_all_data(tmp_path: Path) -> None:
    names = build_wheel(tmp_path)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pegahpc"}
    data = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "slurm").glob("*.md")]
    data += [path for path in (ROOT / "kernels").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    wanted = {f"pegahpc/{path.relative_to(ROOT)}" for path in data}
    wanted |= {f"pegahpc/assets/tiny-moe/{name}" for name in ASSETS} | {"pegahpc/py.typed"}
    wanted |= {f"pegahpc/{path.relative_to(ROOT)}" for path in (ROOT / "assets" / "configs").rglob("*.json")}
    assert wanted <= names


def build_wheel(folder: Path) -> set[str]:
    """Build from a copy: nothing old in build/ gets in, nothing new is left behind. Returns the names in the wheel."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=110)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())
