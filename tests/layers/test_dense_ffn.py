"""The dense FFN against float64."""

import pytest
import torch
from torch.nn import functional

from pegahpc.kernels.registry import Place
from pegahpc.kernels.selected import select_kernels
from pegahpc.layers.dense_ffn import DenseFFN, DenseWeights


@pytest.mark.parametrize("num_rows", [1, 2, 13, 130])
def test_a_dense_ffn_is_down_of_silu_gate_times_up(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(37, 40, generator=generator) / 6, torch.randn(20, 37, generator=generator) / 4
    x = torch.randn(num_rows, 37, generator=generator)
    kernels = select_kernels(Place(device=torch.device("cpu"), row_invariant=True), {})
    ffn = DenseFFN(DenseWeights(gate_up_HI=gate_up, down_IH=down), kernels)
    gate, up = (x.double() @ gate_up.double()).chunk(2, dim=1)
    want = (functional.silu(gate) * up) @ down.double()
    torch.testing.assert_close(ffn.forward(x, num_rows).double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(ffn.forward(x, 0), ffn.forward(x, num_rows))
