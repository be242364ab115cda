"""Under which conditions figures were taken. What is missing is listed, and a result that lacks it carries no claim."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import pegahpc
from pegahpc.plan import source_hash

PACKAGES = ("pegahpc", "torch", "numpy", "aiohttp", "msgspec", "pyzmq", "tokenizers")
COMMAND_TIMEOUT_S = 10.0
# What must be known of the server, by the label that says it where it cannot be found out.
REQUIRED = ("code", "config", "model", "hardware")
GPU_FIELDS = ("name", "driver_version", "compute_cap", "uuid")
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def client(command: Sequence[str]) -> dict[str, Any]:
    """Who measured: code, machine, versions, command, date."""
    return {
        "command": list(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": own_code(),
        "hardware": machine(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": versions(),
    }


def own_code() -> dict[str, Any] | None:
    """The commit of this code and whether files differ from it, or the installed wheel; None: neither is known."""
    folder = Path(pegahpc.__file__).resolve().parent
    parts = [folder, *sorted({path.resolve() for path in folder.iterdir() if path.is_symlink()})]
    commit = _run(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if commit and _run(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]):
        status = _run(["git", "-C", str(folder), "status", "--porcelain", "--", *map(str, parts)]) or ""
        dirty_files = [line[3:] for line in status.splitlines()]
        return {"commit": commit, "is_dirty": bool(dirty_files), "dirty_files": dirty_files, "source": source_hash()}
    wheel = _wheel()
    return None if wheel is None else {**wheel, "is_dirty": False, "source": source_hash()}


def _wheel() -> dict[str, str] | None:
    """Version and hash of an installed wheel: of its list of files, which has the hash of each."""
    try:
        distribution = metadata.distribution("pegahpc")
    except metadata.PackageNotFoundError:
        return None
    listed = distribution.read_text("RECORD")
    if listed is None or "pegahpc/config.py" not in listed:  # an editable install lists a link only
        return None
    return {"version": distribution.version, "wheel_sha256": sha256(listed.encode()).hexdigest()}


def machine() -> dict[str, Any]:
    """This machine: processor and devices."""
    return {
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Python's and of the packages that matter; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_files(folder: Path) -> dict[str, str] | None:
    """Fingerprints of a checkpoint by its small files, and by the names and sizes of its weights; None: not here."""
    if not (folder / "config.json").is_file():
        return None
    digest = sha256()
    for name in MODEL_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return {
        "fingerprint": digest.hexdigest(),
        "config_sha256": _file_sha256(folder / "config.json"),
        "tokenizer_sha256": _file_sha256(folder / "tokenizer.json"),
    }


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A fleet's configuration as it may leave the house: folders by their last name only."""
    shown: dict[str, Any] = json.loads(json.dumps(config))
    for group, key in (("model", "path"), ("fleet", "home")):
        if path := shown.get(group, {}).get(key):
            shown[group][key] = f"<external>/{Path(path).name}"
    return shown


def missing(server: Mapping[str, Any]) -> list[str]:
    """What is not known of a server."""
    return [name for name in REQUIRED if not server.get(name)]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _gpus() -> list[dict[str, str]]:
    """As the driver lists them; which boards they are only as a hash."""
    listed = _run(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"])
    gpus = []
    for line in (listed or "").splitlines():
        gpu = dict(zip(GPU_FIELDS, (field.strip() for field in line.split(",")), strict=False))
        gpus.append(gpu | {"uuid": sha256(gpu.get("uuid", "").encode()).hexdigest()[:16]})
    return gpus


def _file_sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _run(command: list[str]) -> str | None:
    """What a command prints; None if it is not there, fails, or takes too long."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.rstrip() if ran.returncode == 0 else None


def own_command() -> list[str]:
    """The command line, by the program's last name."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
