"""Our own CPU kernels in C: compiled once for this processor, loaded by ctypes, absent without harm. No torch here.

The library lies in a cache folder under a name made of the source, the compiler and the processor, so that a node
of another kind on a shared home builds its own. It ends in a seal: a file that was cut off or changed is built anew,
once. Without a C compiler, or a writable cache, the torch kernels serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import time
from _ctypes import dlclose
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).parent / "csrc" / name for name in ("linear.c", "latent.c", "moe.c", "fabric.c", "program.c")
)
HEADERS = tuple(Path(__file__).parent / "csrc" / name for name in ("vec.h", "linear.h", "ops.h"))
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 60
SEAL_BYTES = 16  # the file's last: a hash of all before. To dlopen a file that was cut off can be the end (SIGBUS)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: Mapping[str, Sequence[type[ctypes.c_void_p] | type[ctypes.c_int64] | type[ctypes.c_float]]] = {
    "rms_norm": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _FLOAT],
    "packed_elements": [_INT] * 2,
    "pack": [_POINTER] * 2 + [_INT] * 3,
    "linear": [_POINTER, _POINTER, _INT, _POINTER, _INT, _INT],
    "swiglu": [_POINTER] * 4 + [_INT],
    "latent_project": [_POINTER] * 7 + [_INT],
    "latent_output": [_POINTER] * 4 + [_INT],
    "route": [_POINTER] * 5 + [_INT],
    "experts": [_POINTER] * 5 + [_INT],
    "moe_output": [_POINTER] * 6 + [_INT] * 4,
    "latent_attention": [_POINTER] * 3 + [_INT] + [_POINTER] * 2 + [_INT] * 5 + [_FLOAT],
    **{f"node_{kind}": [_POINTER] * 2 for kind in ("norm", "add", "attention", "swiglu", "moe")},
    "run_program": [_POINTER, _INT, _POINTER],
    "fabric_rest": [_POINTER],
    "fabric_dispatch": [_POINTER] * 3 + [_INT] * 3 + [_POINTER] * 4,
    "fabric_take_rows": [_POINTER] * 2 + [_INT] + [_POINTER] * 4,
    "fabric_combine": [_POINTER] * 6,
}
RETURNS_INT = (
    "packed_elements",
    "run_program",
    "fabric_rest",
    "fabric_dispatch",
    "fabric_combine",
)  # the others return nothing


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built now if they are not in the cache; None where they cannot be had (logged once)."""
    try:
        return _load_or_build()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("native CPU kernels are not available, torch's are used: %s", error)
        return None


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/pegahpc, else ~/.cache/pegahpc.

    Raises:
        RuntimeError: there is no home (a container that runs as a user it does not know).
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pegahpc"


def _load_or_build() -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) on PATH")
    path = cache_folder() / f"cpu-{_key(compiler)}.so"
    if path.exists():
        try:
            return _load(path)
        except OSError as error:
            log.warning("native CPU kernels are built again, %s cannot be used: %s", path, error)
    _compile(compiler, path)
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions.

    Raises:
        OSError: it is not as it was built, is for another processor, or lacks a function.
    """
    content = path.read_bytes()
    if _seal(content[:-SEAL_BYTES]) != content[-SEAL_BYTES:]:
        raise OSError("the file is not as it was built")
    loaded = ctypes.CDLL(str(path))
    try:
        for name, signature in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = signature
            function.restype = _INT if name in RETURNS_INT else None
    except AttributeError as error:
        dlclose(loaded._handle)  # else the linker takes the next file of this name for this one
        raise OSError(error) from None
    return loaded


def _seal(built: bytes) -> bytes:
    return hashlib.blake2b(built, digest_size=SEAL_BYTES).digest()


def _key(compiler: str) -> str:
    """What the compiled code depends on, as one word."""
    key = hashlib.blake2b(digest_size=12)
    for part in (
        *(source.read_bytes() for source in (*SOURCES, *HEADERS)),
        " ".join(FLAGS).encode(),
        compiler.encode(),
        _processor().encode(),
        f"seal {SEAL_BYTES}".encode(),
    ):
        key.update(part)
    return key.hexdigest()


def _compile(compiler: str, path: Path) -> None:
    """Many ranks may build at once: each writes its own file, and the last rename wins with the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_temp_files(path.parent)
    temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        command = [compiler, *FLAGS, "-o", str(temp), *map(str, SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[:500]}")
        with temp.open("r+b") as file:
            file.write(_seal(file.read()))
            file.flush()
            os.fsync(file)  # a machine that dies now must not leave an empty library under the final name
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def _drop_temp_files(folder: Path) -> None:
    """Remove what builds that were killed have left."""
    for temp in folder.glob(".cpu-*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - temp.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                temp.unlink()


def _processor() -> str:
    """What -march=native depends on: the machine and its feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine() + flags
