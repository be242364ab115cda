"""Experts that stay packed: every backend against float64 of the values written out, and by its bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import quantize
import torch

import pegahpc.kernels.selected  # noqa: F401  (registers)
from pegahpc.kernels.formats import Packed
from pegahpc.kernels.matmul_rows import is_row_invariant
from pegahpc.kernels.packed_experts import PackedExperts
from pegahpc.kernels.registry import Place, backends_of, select
from pegahpc.kernels.weight_format import INT4_GROUP, MXFP4, WeightFormat, fp8_block

CPU = Place(device=torch.device("cpu"))
INVARIANT = Place(device=torch.device("cpu"), row_invariant=True)
HIDDEN, WIDTH, NUM_EXPERTS = 64, 32, 3
FP8 = fp8_block(24, 40)
Pair = tuple[torch.Tensor, torch.Tensor]
WRITERS: dict[str, tuple[Callable[[torch.Tensor], Pair], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "fp8_block": (lambda weight: quantize.fp8_block(weight, (24, 40)),
                  lambda codes, scales: quantize.read_fp8_block(codes, scales, (24, 40))),
    "int4_group": (quantize.int4_group, quantize.read_int4_group),
    "mxfp4": (quantize.mxfp4, quantize.read_mxfp4),
}  # fmt: skip


def stack(format: WeightFormat, num_out: int, num_in: int, seed: int) -> tuple[Packed, torch.Tensor]:
    """Packed, and [num_experts, out, in] written out."""
    write, read = WRITERS[format.name]
    generator = torch.Generator().manual_seed(seed)
    parts = [write(torch.randn(num_out, num_in, generator=generator) / num_in**0.5) for _ in range(NUM_EXPERTS)]
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in parts]).view(parts[0][0].dtype)
    packed = Packed(format=format, codes=codes, scales=torch.stack([scales for _, scales in parts]))
    return packed, torch.stack([read(*part) for part in parts]).double()


def experts_of(format: WeightFormat) -> tuple[PackedExperts, list[torch.Tensor]]:
    gate, up, down = (stack(format, *shape) for shape in ((WIDTH, HIDDEN, 1), (WIDTH, HIDDEN, 2), (HIDDEN, WIDTH, 3)))
    return PackedExperts(gate=gate[0], up=up[0], down=down[0]), [gate[1], up[1], down[1]]


@pytest.mark.parametrize("backend", backends_of("grouped_swiglu_packed", CPU))
@pytest.mark.parametrize("format", [FP8, INT4_GROUP, MXFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("sizes", [[0, 0, 0], [1, 0, 0], [0, 37, 0], [2, 3, 17]])
def test_each_group_goes_through_its_expert(backend: str, format: WeightFormat, sizes: list[int]) -> None:
    experts, (gate, up, down) = experts_of(format)
    x = torch.randn(sum(sizes), HIDDEN, generator=torch.Generator().manual_seed(0))
    got = select("grouped_swiglu_packed", CPU, backend)(x, experts, sizes)
    groups = torch.split(x.double(), sizes)
    want = torch.cat([(torch.nn.functional.silu(rows @ gate[e].T) * (rows @ up[e].T)) @ down[e].T
                      for e, rows in enumerate(groups)])  # fmt: skip
    assert got.dtype == torch.float32 and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", backends_of("grouped_swiglu_packed", INVARIANT))
def test_a_row_keeps_its_bits(backend: str) -> None:
    shapes = [(1, HIDDEN, 2 * WIDTH), (1, WIDTH, HIDDEN)]
    if backend == "even" and not is_row_invariant(shapes, torch.float32):
        pytest.skip("needs a library whose products do not change with the row count")
    op, (experts, _) = select("grouped_swiglu_packed", INVARIANT, backend), experts_of(INT4_GROUP)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))
    whole = op(x, experts, [0, 40, 0])
    for count in (1, 2, 7, 39):
        assert torch.equal(op(x[:count], experts, [0, count, 0]), whole[:count])


@pytest.mark.parametrize("format", [FP8, INT4_GROUP, MXFP4], ids=lambda format: format.name)
def test_an_expert_is_unpacked_to_the_rows_type_gate_first(format: WeightFormat) -> None:
    experts, (gate, up, down) = experts_of(format)
    gate_up, down_1 = experts.unpacked(1, torch.bfloat16)
    assert torch.equal(gate_up, torch.cat((gate[1], up[1])).float().bfloat16().T)
    assert torch.equal(down_1, down[1].float().bfloat16().T) and gate_up.is_contiguous() and down_1.is_contiguous()
