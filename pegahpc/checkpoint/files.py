"""A checkpoint's files: which tensor lies where, of what shape and type. Reads headers only, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message lists every fault found, one a line."""


def faults(found: Iterable[str], *, most: int = 10) -> CheckpointError:
    """One error for all faults; the first `most` are written out."""
    lines = list(found)
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return CheckpointError("\n".join([*lines[:most], *more]))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' names: F32, BF16, ...


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint by name.

    Raises:
        CheckpointError: no weights, a shard that is missing, damaged or cut short, or an index that disagrees with
            its shards.
    """
    placed = _placement(folder)
    headers: dict[Path, dict[str, TensorInfo]] = {}
    found: list[str] = []
    for file in sorted(set(placed.values())):
        try:
            headers[file] = _header(file)
        except (OSError, SafetensorError) as error:
            found.append(f"{file}: cannot be read ({error}); is the file whole?")
    if not found:
        found = [f"{file}: has no tensor {name!r}, which {INDEX} puts there" for name, file in placed.items()
                 if name and name not in headers[file]]  # fmt: skip
    if found:
        raise faults(found)
    tensors = {name: info for header in headers.values() for name, info in header.items()}
    return tensors | {name: headers[file][name] for name, file in placed.items() if name}


def _placement(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, by the index; or the single file under the empty name."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder}: has neither {INDEX} nor {SINGLE}")
        return {"": folder / SINGLE}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        placed = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index}: is no safetensors index ({error!r})") from None
    outside = next((file for file in placed.values() if Path(file).name != file), None)
    if outside is not None:
        raise CheckpointError(f"{index}: names the file {outside!r}, which is not one of its own folder")
    return {name: folder / file for name, file in placed.items()}


def _header(file: Path) -> dict[str, TensorInfo]:
    with safe_open(file, framework="np") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        return {name: TensorInfo(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
