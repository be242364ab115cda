"""The MoE layer against one token at a time, and what padding rows get."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from pegahpc.kernels.registry import Place
from pegahpc.kernels.selected import REFERENCE, select_kernels
from pegahpc.moe.dispatch import LocalDispatcher
from pegahpc.moe.layer import MoELayer, MoEWeights
from pegahpc.moe.shape import RouterShape

HIDDEN, WIDTH, EXPERTS, TOPK = 37, 20, 6, 3
CPU = Place(device=torch.device("cpu"), row_invariant=True)
KERNELS = {
    "auto": select_kernels(CPU, {}),
    "torch": select_kernels(CPU, REFERENCE),
}


def randn(*shape: int, seed: int) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise / math.sqrt(shape[-2])


def weights_of(*, shared: bool = True, favourite: int | None = None) -> MoEWeights:
    bias = randn(1, EXPERTS, seed=1)[0] * 0.1
    if favourite is not None:
        bias[favourite : favourite + TOPK] += 9.0
    return MoEWeights(
        gate_HE=randn(HIDDEN, EXPERTS, seed=2),
        bias_E=bias,
        gate_up_EHI=randn(EXPERTS, HIDDEN, 2 * WIDTH, seed=3),
        down_EIH=randn(EXPERTS, WIDTH, HIDDEN, seed=4),
        shared_gate_up_HI=randn(HIDDEN, 2 * WIDTH, seed=5) if shared else None,
        shared_down_IH=randn(WIDTH, HIDDEN, seed=6) if shared else None,
    )


def layer_of(kernels: str, weights: MoEWeights) -> MoELayer:
    shape = RouterShape(num_experts=EXPERTS, num_topk=TOPK, scoring="sigmoid", method="noaux_tc", norm_topk_prob=True,
                        scale=1.7)  # fmt: skip
    return MoELayer(shape, weights, KERNELS[kernels], LocalDispatcher(EXPERTS))


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ gate_up.double()).chunk(2)
    return (functional.silu(gate) * up) @ down.double()


def shared_of(weights: MoEWeights, x: torch.Tensor) -> torch.Tensor:
    gate_up, down = weights.shared_gate_up_HI, weights.shared_down_IH
    return torch.zeros(HIDDEN).double() if gate_up is None or down is None else swiglu(x, gate_up, down)


def token_by_token(weights: MoEWeights, x: torch.Tensor) -> torch.Tensor:
    out = shared_of(weights, x)
    scores = (x.double() @ weights.gate_HE.double()).sigmoid()
    assert weights.bias_E is not None and weights.gate_up_EHI is not None and weights.down_EIH is not None
    chosen = (scores + weights.bias_E).topk(TOPK).indices.tolist()
    for expert in chosen:
        share = scores[expert] / scores[chosen].sum() * 1.7
        out = out + share * swiglu(x, weights.gate_up_EHI[expert], weights.down_EIH[expert])
    return out


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "no shared"])
@pytest.mark.parametrize("favourite", [None, 2], ids=["spread", "all to the same experts"])
@pytest.mark.parametrize("num_rows", [1, 2, 13])
def test_a_layer_matches_one_token_at_a_time(num_rows: int, favourite: int | None, shared: bool, kernels: str) -> None:
    weights, x = weights_of(shared=shared, favourite=favourite), randn(num_rows, HIDDEN, seed=7) * 3
    want = torch.stack([token_by_token(weights, row) for row in x])
    torch.testing.assert_close(layer_of(kernels, weights).forward(x, num_rows).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_padding_rows_get_the_shared_expert_and_no_routed_one(kernels: str) -> None:
    weights, x = weights_of(), randn(8, HIDDEN, seed=7)
    layer = layer_of(kernels, weights)
    for num_live in (0, 1, 5, 8):
        out = layer.forward(x, num_live)
        for row in range(num_live, 8):
            torch.testing.assert_close(out[row].double(), shared_of(weights, x[row]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_layer_without_a_shared_expert_leaves_padding_rows_zero(kernels: str) -> None:
    layer, x = layer_of(kernels, weights_of(shared=False)), randn(8, HIDDEN, seed=7)
    out = layer.forward(x, 3)
    assert out[:3].any(dim=1).all() and not out[3:].any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_live_rows_keep_their_bits_whatever_padding_follows(kernels: str) -> None:
    layer, x = layer_of(kernels, weights_of()), randn(5, HIDDEN, seed=7)
    alone = layer.forward(torch.cat((x, torch.zeros(1, HIDDEN))), 5)[:5]
    for num_padding in (3, 11, 124):
        padding = randn(num_padding, HIDDEN, seed=8)
        assert torch.equal(layer.forward(torch.cat((x, padding)), 5)[:5], alone)


def test_the_input_is_left_as_it_was() -> None:
    layer, x = layer_of("auto", weights_of()), randn(6, HIDDEN, seed=7)
    before = x.clone()
    layer.forward(x, 4)
    assert torch.equal(x, before)
