"""The compiled kernels' library: built once, shared by many processes, and absent without harm."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import pegahpc.kernels.selected  # noqa: F401  (registers)
from pegahpc.kernels import native
from pegahpc.kernels.registry import Place, choose, ops

CPU = Place(device=torch.device("cpu"), row_invariant=True)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The library is looked for anew in each test, and after it."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def assert_torch_serves(caplog: pytest.LogCaptureFixture, said: str) -> None:
    """No op chooses `native`, and all of that is said once."""
    assert all(choose(op, CPU) != "native" for op in ops())
    (warning,) = warnings_of(caplog)
    assert warning.startswith("native CPU kernels are not available, torch's are used: ") and said in warning


def test_without_a_compiler_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_torch_serves(caplog, "no C compiler (cc, gcc or clang) on PATH")


@needs_compiler
def test_without_a_writable_cache_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")  # holds for root too, whom no mode keeps out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_torch_serves(caplog, "file")


@needs_compiler
def test_without_a_home_torch_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert_torch_serves(caplog, "Could not determine home directory.")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'unknown flag' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(compiler.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert_torch_serves(caplog, f"{compiler} failed: unknown flag")
    assert list((tmp_path / "cache" / "pegahpc").iterdir()) == []


@needs_compiler
def test_a_cached_library_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is not None
    monkeypatch.setattr(native, "_compile", lambda compiler, path: pytest.fail("it was compiled again"))
    native.library.cache_clear()
    assert native.library() is not None


def cut(built: bytes) -> bytes:
    return built[: len(built) // 2]


def with_another_bit(built: bytes) -> bytes:
    return built[:5000] + bytes([built[5000] ^ 1]) + built[5001:]


def sealed(built: bytes) -> bytes:
    """As the file ends: 16 bytes of BLAKE2b over all before."""
    return built + hashlib.blake2b(built, digest_size=16).digest()


def for_another_processor(built: bytes) -> bytes:
    return sealed(built[:18] + b"\xff\x7f" + built[20:-16])  # e_machine of the ELF header


def without_a_function(built: bytes) -> bytes:
    return sealed(built[:-16].replace(b"\0fabric_rest\0", b"\0fabric_nest\0"))  # which no other function calls


@needs_compiler
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda built: b"", "not as it was built"),
        (cut, "not as it was built"),
        (with_another_bit, "not as it was built"),
        (for_another_processor, "cannot open shared object file"),
        (without_a_function, "undefined symbol: fabric_rest"),
    ],
)
def test_a_library_that_cannot_be_used_is_built_again_once_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    says: str,
) -> None:
    loaded = native.library()
    assert loaded is not None
    whole = Path(loaded._name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    damaged = tmp_path / "pegahpc" / whole.name
    damaged.parent.mkdir()
    damaged.write_bytes(damage(whole.read_bytes()))
    native.library.cache_clear()
    assert choose("rms_norm", CPU) == "native"
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"native CPU kernels are built again, {damaged} cannot be used: ") and says in warning
    native.library.cache_clear()
    assert native.library() is not None and len(warnings_of(caplog)) == 1
    assert [file.name for file in damaged.parent.iterdir()] == [whole.name]


@needs_compiler
def test_what_a_killed_build_left_is_removed_by_the_next_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pegahpc").mkdir()
    old, new = (tmp_path / "pegahpc" / f".cpu-{age}.so.1.tmp" for age in ("old", "new"))
    for temp in (old, new):
        temp.touch()
    os.utime(old, (0, 0))
    assert native.library() is not None
    assert not old.exists() and new.exists()


@needs_compiler
def test_first_builds_at_once_leave_one_file_and_serve_both(tmp_path: Path) -> None:
    code = "from pegahpc.kernels import native; print(native.library() is not None)"
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=100)[0].strip() for process in both] == [b"True", b"True"]
    (file,) = (tmp_path / "pegahpc").iterdir()
    assert file.name.startswith("cpu-") and file.suffix == ".so"


@needs_compiler
def test_the_signatures_name_every_function_of_the_source() -> None:
    public = {
        name
        for source in native.SOURCES
        for name in re.findall(r"^(?:void|int64_t) (\w+)\(", source.read_text(), flags=re.MULTILINE)
    }
    assert public == set(native.SIGNATURES)


def test_looking_for_the_library_does_not_import_torch() -> None:
    code = "import sys; import pegahpc.kernels.native; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"False"
