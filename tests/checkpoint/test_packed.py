"""Packed matrices on their way into a rank: kept or unpacked, checked, and named where they are no numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packed_checkpoints import METHODS, packed
from tensor_files import Checkpoint, ShareOfExperts, load, spec_of, weights_of

from pegahpc.checkpoint.files import CheckpointError, read_headers
from pegahpc.checkpoint.intake import Intake
from pegahpc.checkpoint.manifest import check

EXPERT = "model.layers.2.mlp.experts.5.down_proj"
PACKED = ["fp8", "int4", "mxfp4"]


@pytest.fixture(params=PACKED)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def packed_checkpoint(original: Path, tmp_path: Path, method: str) -> Checkpoint:
    return packed(tmp_path, original, method)


def fault_of(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as error:
        load(checkpoint.single())
    return str(error.value)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor that a load makes room for."""
    tensors: list[torch.Tensor] = []
    new = Intake.new

    def spy(self: Intake, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensors.append(new(self, *shape, dtype=dtype))
        return tensors[-1]

    monkeypatch.setattr(Intake, "new", spy)
    return tensors


def test_packed_experts_are_held_as_the_bytes_that_are_stored(
    packed_checkpoint: Checkpoint, method: str, held: list[torch.Tensor]
) -> None:
    load(packed_checkpoint.single(), ShareOfExperts(4, 4))
    codes = METHODS[method].suffixes[0]
    stored = packed_checkpoint.tensors[EXPERT + codes]
    stacks = [tensor for tensor in held if tensor.dtype == stored.dtype and tensor.shape == (4, *stored.shape)]
    assert len(stacks) == 2, "one for each MoE layer"
    assert any(torch.equal(stack[1].view(torch.uint8), stored.view(torch.uint8)) for stack in stacks)
    scales = packed_checkpoint.tensors[EXPERT + METHODS[method].suffixes[1]]
    assert any(tensor.shape == (4, *scales.shape) and torch.equal(tensor[1], scales) for tensor in held)


def test_everything_else_is_unpacked_to_the_engines_type(packed_checkpoint: Checkpoint, method: str) -> None:
    weights = weights_of(load(packed_checkpoint.single(), dtype=torch.bfloat16))
    base, (codes, scales) = "model.layers.1.self_attn.o_proj", METHODS[method].suffixes
    stored = packed_checkpoint.tensors
    want = METHODS[method].read(stored[base + codes], stored[base + scales]) if base + scales in stored \
        else stored[base + ".weight"]  # fmt: skip
    assert torch.equal(weights["1.attention.o_proj"], want.T.bfloat16())


@pytest.mark.parametrize("part", [0, 1], ids=["codes", "scales"])
def test_a_missing_half_of_a_packed_matrix_is_named(packed_checkpoint: Checkpoint, method: str, part: int) -> None:
    gone = EXPERT + METHODS[method].suffixes[part]
    shape = list(packed_checkpoint.tensors.pop(gone).shape)
    assert fault_of(packed_checkpoint) == f"{gone}: is missing from the checkpoint (expected shape {shape})"


def spoil_code(checkpoint: Checkpoint, base: str) -> str:
    checkpoint.tensors[base + ".weight"].view(torch.uint8)[-1, -1] = 0xFF
    return base + ".weight"


def spoil_scale(checkpoint: Checkpoint, base: str) -> str:
    checkpoint.tensors[base + ".weight_scale_inv"][-1, -1] = float("inf")
    return base + ".weight_scale_inv"


def spoil_group_scale(checkpoint: Checkpoint, base: str) -> str:
    checkpoint.tensors[base + ".weight_scale"][-1, -1] = float("nan")
    return base + ".weight_scale"


@pytest.mark.parametrize("base", [EXPERT, "model.layers.0.self_attn.kv_b_proj"])
@pytest.mark.parametrize("spoil", [spoil_code, spoil_scale])
def test_fp8_that_is_no_number_is_named(
    original: Path, tmp_path: Path, base: str, spoil: Callable[[Checkpoint, str], str]
) -> None:
    checkpoint = packed(tmp_path, original, "fp8")
    name = spoil(checkpoint, base)
    assert fault_of(checkpoint) == f"{name}: holds values that are not finite (model.safetensors)"


def test_a_scale_of_int4_that_is_no_number_is_named(original: Path, tmp_path: Path) -> None:
    checkpoint = packed(tmp_path, original, "int4")
    name = spoil_group_scale(checkpoint, EXPERT)
    assert fault_of(checkpoint) == f"{name}: holds values that are not finite (model.safetensors)"


@pytest.mark.parametrize("scale", [253, 255])
def test_values_of_mxfp4_that_are_no_numbers_are_named(original: Path, tmp_path: Path, scale: int) -> None:
    """255 is no number; 6 * 2^(253 - 127) is beyond float32."""
    checkpoint = packed(tmp_path, original, "mxfp4")
    checkpoint.tensors[EXPERT + ".weight_packed"][-1, -1] = 0x77
    checkpoint.tensors[EXPERT + ".weight_scale"][-1, -1] = scale
    assert fault_of(checkpoint) == f"{EXPERT}.weight_packed: holds values that are not finite (model.safetensors)"


def test_scales_of_mxfp4_may_carry_their_own_type(original: Path, tmp_path: Path, held: list[torch.Tensor]) -> None:
    checkpoint = packed(tmp_path, original, "mxfp4")
    load(checkpoint.single())
    want = [tensor.clone() for tensor in held]
    held.clear()
    for name in [name for name in checkpoint.tensors if name.endswith("_scale")]:
        checkpoint.tensors[name] = checkpoint.tensors[name].view(torch.float8_e8m0fnu)
    load(checkpoint.single())
    assert all(torch.equal(got, tensor) for got, tensor in zip(held, want, strict=True))


def test_shapes_that_lie_beside_the_codes_are_not_read(original: Path, tmp_path: Path) -> None:
    checkpoint = packed(tmp_path, original, "int4")
    checkpoint.tensors[EXPERT + ".weight_shape"] = torch.tensor([64, 32], dtype=torch.int32)
    names = {tensor.name for tensor in check(spec_of(checkpoint.single()), read_headers(checkpoint.folder))}
    assert EXPERT + ".weight_shape" not in names
    load(checkpoint.folder)


def test_a_layer_whose_experts_are_not_all_packed_is_unpacked(original: Path, tmp_path: Path) -> None:
    """A checkpoint that was repaired by hand is still right."""
    checkpoint = packed(tmp_path, original, "int4")
    method = METHODS["int4"]
    codes, scales = (checkpoint.tensors.pop(EXPERT + suffix) for suffix in method.suffixes)
    checkpoint.tensors[EXPERT + ".weight"] = method.read(codes, scales)
    assert torch.equal(weights_of(load(checkpoint.single()))["2.ffn.down_EWH"][5], method.read(codes, scales).T)
