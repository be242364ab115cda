"""Where the code, the model and the machine come from: a commit with its changes, or a wheel, or a refusal."""

from __future__ import annotations

import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pegahpc.bench import provenance, served
from pegahpc.plan import source_hash
from pegahpc.wire.keys import FleetSecret
from tests.bench.made import CONFIG

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets" / "tiny-moe"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository that has the package's place."""
    package = tmp_path / "repo" / "pegahpc"
    package.mkdir(parents=True)
    (tmp_path / "repo" / "launch").mkdir()
    (package / "launch").symlink_to("../launch")
    (package / "__init__.py").touch()
    (package.parent / "launch" / "cli.py").write_text("1\n")
    git(package.parent, "init", "-q")
    git(package.parent, "add", "-A")
    git(package, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "x")
    monkeypatch.setattr("pegahpc.__file__", str(package / "__init__.py"))
    return package


def git(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def test_a_checkout_is_its_commit_and_clean_until_a_file_of_the_code_differs(checkout: Path) -> None:
    code = provenance.own_code()
    assert code is not None
    assert code["commit"] == git(checkout, "rev-parse", "HEAD") and code["is_dirty"] is False
    (checkout.parent / "result.json").touch()  # beside the code, as results are
    assert (provenance.own_code() or {})["is_dirty"] is False
    (checkout.parent / "launch" / "cli.py").write_text("2\n")
    (checkout / "new.py").touch()
    code = provenance.own_code()
    assert code is not None and code["is_dirty"] is True
    assert sorted(code["dirty_files"]) == ["launch/cli.py", "pegahpc/new.py"]


def test_code_that_is_in_somebody_elses_repository_does_not_take_its_commit(checkout: Path) -> None:
    git(checkout, "rm", "-q", "--cached", "__init__.py")
    code = provenance.own_code()
    assert code is None or "commit" not in code


def test_a_wheel_is_its_version_and_the_hash_of_its_list_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    record = "pegahpc/config.py,sha256=abc,1\n"

    class Wheel:
        version = "1.2"

        def read_text(self, name: str) -> str:
            return {"RECORD": record}[name]

    monkeypatch.setattr("pegahpc.__file__", "/nowhere/pegahpc/__init__.py")
    monkeypatch.setattr(provenance, "_run", lambda command: None)
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Wheel())
    code = provenance.own_code()
    assert code is not None
    assert (code["version"], code["wheel_sha256"]) == ("1.2", sha256(record.encode()).hexdigest())


def test_a_models_fingerprint_changes_with_each_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    first = provenance.model_files(folder)
    assert first == provenance.model_files(TINY) and first is not None
    assert first["tokenizer_sha256"] == sha256((TINY / "tokenizer.json").read_bytes()).hexdigest()
    for name in ("tokenizer.json", "generation_config.json", "model.safetensors"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        changed = provenance.model_files(folder)
        assert changed is not None and changed["fingerprint"] != first["fingerprint"]
        first = changed
    assert provenance.model_files(tmp_path) is None


def test_folders_do_not_leave_the_house() -> None:
    shown = provenance.public_config({"model": {"path": "/secret/place/m"}, "fleet": {"home": "/home/me/x"}})
    assert shown == {"model": {"path": "<external>/m"}, "fleet": {"home": "<external>/x"}}


def fleet(**given: Any) -> served.KnownFleet:
    config = CONFIG | {"model": {"path": str(TINY), "max_model_len": 512}}
    fields: dict[str, Any] = {
        "name": "f",
        "url": "u",
        "model": "m",
        "host": "elsewhere",
        "source": source_hash(),
        "fingerprint": "p",
    }
    fields |= {"config": config, "devices": ["cuda:0", "cuda:1"], "endpoints": [], "secret": FleetSecret.create()}
    return served.KnownFleet(**(fields | given))


def test_what_cannot_be_known_of_a_fleet_is_missing_and_labels_fill_it() -> None:
    server = served.of_fleet(fleet(), kind="fleet")
    assert provenance.missing(server) == ["hardware"]  # it is on another host
    assert provenance.missing(served.with_labels(server, {"hardware": "2xH200"})) == []
    other_code = served.of_fleet(fleet(source="other"), kind="fleet")
    assert provenance.missing(other_code) == ["code", "hardware"]
    nothing = served.of_fleet(fleet(source="", config={}), kind="fleet")
    assert provenance.missing(nothing) == ["code", "config", "model", "hardware"]


def test_a_label_does_not_change_what_is_known() -> None:
    server = served.of_fleet(fleet(), kind="fleet")
    assert served.with_labels(server, {"model": "another"})["model"] == server["model"]


def test_prompts_are_drawn_from_the_tokenizers_own_ids() -> None:
    material = served.vocabulary(TINY)
    assert material is not None
    assert (material.size, material.special) == (3072, frozenset(range(6)))
    assert served.vocabulary(TINY.parent) is None
