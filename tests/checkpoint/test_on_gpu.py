"""Loads onto a CUDA device: the same weights as on the CPU, packed or not, and packed experts that compute there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import quantize
import torch
from packed_checkpoints import packed
from tensor_files import load, weights_of

from pegahpc.checkpoint.files import CheckpointError
from pegahpc.kernels.formats import Packed
from pegahpc.kernels.packed_experts import PackedExperts, grouped_swiglu_packed_torch
from pegahpc.kernels.weight_format import INT4_GROUP, MXFP4, WeightFormat, fp8_block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed_experts", [True, False])
def test_weights_are_the_cpus(
    original: Path, tmp_path: Path, method: str, dtype: torch.dtype, packed_experts: bool
) -> None:
    folder = packed(tmp_path, original, method).sharded()
    want = weights_of(load(folder, dtype=dtype, packed_experts=packed_experts))
    got = weights_of(load(folder, dtype=dtype, packed_experts=packed_experts, device="cuda"))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].is_cuda and got[name].dtype == tensor.dtype and torch.equal(got[name].cpu(), tensor), name


def test_what_is_no_number_is_found_there_too(original: Path, tmp_path: Path) -> None:
    checkpoint = packed(tmp_path, original, "fp8")
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    checkpoint.tensors[name].view(torch.uint8)[3, 3] = 0x7F
    with pytest.raises(CheckpointError, match=f"^{name}: holds values that are not finite"):
        load(checkpoint.single(), device="cuda")


WRITERS: list[tuple[WeightFormat, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]] = [
    (fp8_block(24, 40), lambda weight: quantize.fp8_block(weight, (24, 40))),
    (INT4_GROUP, quantize.int4_group),
    (MXFP4, quantize.mxfp4),
]


@pytest.mark.parametrize(("format", "write"), WRITERS)
def test_packed_experts_compute_there(
    format: WeightFormat, write: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    def stack(num_out: int, num_in: int, device: str) -> Packed:
        weight = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(num_in)) / num_in**0.5
        codes, scales = (part[None].to(device) for part in write(weight))
        return Packed(format=format, codes=codes, scales=scales)

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    outs = []
    for device in ("cpu", "cuda"):
        experts = PackedExperts(gate=stack(32, 64, device), up=stack(32, 64, device), down=stack(64, 32, device))
        gate_up, down = experts.unpacked(0, torch.float32)
        outs.append((gate_up.cpu(), down.cpu(), grouped_swiglu_packed_torch(x.to(device), experts, [5]).cpu()))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    torch.testing.assert_close(outs[0][2], outs[1][2], rtol=1e-4, atol=1e-5)
