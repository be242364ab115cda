"""A checkpoint's files: which tensor lies where, of what shape and type. Reads headers only, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; the message lists every fault found, one a line."""


def faults(*groups: list[str], most: int = 10) -> CheckpointError:
    """One error for all faults, group after group; the first `most` are written out, of each group at least one."""
    shown = [0] * len(groups)
    while sum(shown) < most and any(count < len(group) for count, group in zip(shown, groups, strict=True)):
        for index, group in enumerate(groups):
            shown[index] += shown[index] < len(group) and sum(shown) < most
    lines = [line for count, group in zip(shown, groups, strict=True) for line in group[:count]]
    left = sum(map(len, groups)) - len(lines)
    return CheckpointError("\n".join([*lines, *([f"... and {left} more"] if left else [])]))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' names: F32, BF16, ...
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class Headers:
    """What the headers of a checkpoint's files say."""

    tensors: dict[str, TensorInfo]  # by name; what damaged files hold is not among them
    damaged: list[str]  # faults of files, a line each
    lost: frozenset[str]  # names that the index puts into damaged files


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights, or a config.json alone."""
    return (folder / INDEX).exists() or (folder / SINGLE).exists()


def read_headers(folder: Path) -> Headers:
    """All tensors of a checkpoint by name, with the faults of its files: missing, cut short, or not as the index says.

    Raises:
        CheckpointError: no weights at all, or an index that is none.
    """
    placed = _placement(folder)
    headers: dict[Path, dict[str, TensorInfo]] = {}
    damaged: list[str] = []
    for file in sorted(set(placed.values())):
        try:
            headers[file] = _header(file)
        except (OSError, ValueError, SafetensorError) as error:
            damaged.append(f"{file}: cannot be read ({error}); is the file whole?")
    lost = {name for name, file in placed.items() if name not in headers.get(file, {})} - {""}
    damaged += [f"{placed[name]}: has no tensor {name!r}, which {INDEX} puts there"
                for name in placed if name in lost and placed[name] in headers]  # fmt: skip
    tensors = {name: info for header in headers.values() for name, info in header.items()}
    tensors |= {name: headers[file][name] for name, file in placed.items() if name and name not in lost}
    if damaged and not tensors:
        raise faults(damaged)
    return Headers(tensors, damaged, frozenset(lost))


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
    """safetensors checks the file (whole, no holes, types and shapes that fit); where tensors lie says its header."""
    with safe_open(file, framework="np"), file.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(size))
    return {
        name: TensorInfo(file, tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
