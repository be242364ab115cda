"""Tiny checkpoints whose matrices are packed, and the same with every value written out, for an official class."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantize
import torch
from safetensors.torch import load_file
from tensor_files import Checkpoint

Tensors = dict[str, torch.Tensor]
GROUPS: dict[str, Any] = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "dynamic": False}


def fp8_config(block: tuple[int, int]) -> dict[str, Any]:
    """As DeepSeek-V3 publishes it."""
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}


def groups_config(name: str, kind: str) -> dict[str, Any]:
    """As compressed-tensors writes it."""
    return {"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed", "ignore": [],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS | {"type": kind}}}}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a test packs matrices."""

    config: dict[str, Any]  # quantization_config
    suffixes: tuple[str, str]  # of codes and scales
    which: re.Pattern[str]  # names of the matrices
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fp8(block: tuple[int, int]) -> Method:
    """All projections, in such blocks."""
    return Method(
        config=fp8_config(block),
        suffixes=(".weight", ".weight_scale_inv"),
        which=re.compile(r"_proj(_with_mqa)?\.weight$"),
        pack=lambda weight: quantize.fp8_block(weight, block),
        read=lambda codes, scales: quantize.read_fp8_block(codes, scales, block),
    )


METHODS = {
    "fp8": fp8((24, 40)),  # blocks that the edges of almost every matrix cut off
    "fp8-whole": fp8((8, 8)),  # which divide every width: what the official class can read by itself
    "int4": Method(
        config=groups_config("pack-quantized", "int"),
        suffixes=(".weight_packed", ".weight_scale"),
        which=re.compile(r"\.mlp\.experts\.\d+\."),
        pack=quantize.int4_group,
        read=quantize.read_int4_group,
    ),
    "mxfp4": Method(
        config=groups_config("mxfp4-pack-quantized", "float"),
        suffixes=(".weight_packed", ".weight_scale"),
        which=re.compile(r"\.mlp\.experts\.\d+\."),
        pack=quantize.mxfp4,
        read=quantize.read_mxfp4,
    ),
}


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a checkpoint."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


def packed(folder: Path, original: Path, name: str, **changes: Any) -> Checkpoint:
    """The original's matrices packed by the method of this name; `sharded` or `single` writes it."""
    config, tensors = read_checkpoint(original)
    method = METHODS[name]
    for name in [name for name in tensors if method.which.search(name)]:
        parts = method.pack(tensors.pop(name).float())
        tensors |= dict(zip((name.removesuffix(".weight") + suffix for suffix in method.suffixes), parts, strict=True))
    return Checkpoint(folder, config | {"quantization_config": method.config} | changes, tensors)


def written_out(folder: Path, checkpoint: Checkpoint, name: str) -> Path:
    """The same model, each packed value as float32."""
    method, tensors = METHODS[name], dict(checkpoint.tensors)
    codes, scales = method.suffixes
    for name in [name for name in tensors if name.endswith(scales)]:
        base = name.removesuffix(scales)
        tensors[base + ".weight"] = method.read(tensors.pop(base + codes), tensors.pop(name))
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    return Checkpoint(folder, config | {"model_type": "deepseek_v3"}, tensors).sharded()


def swap_nibbles(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Every pair of codes in a byte the other way round."""
    return {name: _swapped(tensor) if name.endswith("_packed") else tensor for name, tensor in tensors.items()}


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(torch.uint8)
    return (bits >> 4 | bits << 4).view(tensor.dtype)


def roll_scales(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Every scale belongs to the block, or the group, before its own."""
    return {name: tensor.roll(1, -1) if "scale" in name else tensor for name, tensor in tensors.items()}


def turn_scale_blocks(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Scales of each matrix in transposed order."""
    return {name: tensor.t().reshape(tensor.shape) if "scale" in name else tensor for name, tensor in tensors.items()}


def flip_signs_of_zero_point(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The offset of INT4 or the sign bit of E2M1 is missed: each nibble's highest bit the other way round."""
    return {name: (tensor.contiguous().view(torch.uint8) ^ 0x88).view(tensor.dtype) if name.endswith("_packed")
            else tensor for name, tensor in tensors.items()}  # fmt: skip
