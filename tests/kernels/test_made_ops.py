"""Ops made from their weights: the compiled ones against those composed of the reference, and their bits by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pegahpc.kernels import native
from pegahpc.kernels.native_layers import Packer
from pegahpc.kernels.registry import Place, backends_of
from pegahpc.kernels.selected import MADE, REFERENCE, Kernels, select_kernels

PLACE = Place(device=torch.device("cpu"), row_invariant=True)
COMPILED = select_kernels(PLACE, {op: "native" for op in MADE if "native" in backends_of(op, PLACE)})
REFERENCES = select_kernels(PLACE, REFERENCE)
CLOSE = 2e-5  # float32, sums of at most 200 products of size about 1
ROW_COUNTS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33]
HIDDEN, HEADS, NOPE, LATENT, ROTARY, VALUE, EXPERTS, TOPK = 37, 5, 9, 21, 6, 13, 7, 3
# Columns: below, at and above a vector of 4, 8 and 16 floats, and panels of one to four of them and more.
WIDTHS = [1, 3, 4, 8, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 129]

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def randn(*shape: int, seed: int = 0, is_bfloat16: bool = False) -> torch.Tensor:
    noise: torch.Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / max(shape[-2], 1) ** 0.5
    return noise.bfloat16().float() if is_bfloat16 else noise


def call_latent(kernels: Kernels, x: torch.Tensor, has_q_b: bool) -> torch.Tensor:
    """Queries, then the cache rows that were written, of the rows at positions 0, 1, ..."""
    heads, num_rows = HEADS * (NOPE + ROTARY), x.shape[0]
    project = kernels.latent_project(
        qkv_a_HX=randn(HIDDEN, (11 if has_q_b else heads) + LATENT + ROTARY, seed=1),
        q_a_norm=randn(1, 11, seed=2)[0] + 1 if has_q_b else None,
        q_b=randn(11, heads, seed=3) if has_q_b else None,
        kv_a_norm_C=randn(1, LATENT, seed=4)[0] + 1,
        w_uk_NPC=randn(HEADS, NOPE, LATENT, seed=5),
        rotary=ROTARY,
        eps=1e-6,
    )
    cache = torch.zeros(200, LATENT + ROTARY)
    row_idx = torch.arange(num_rows) * 5 + 2
    cis = torch.polar(torch.ones(1), torch.arange(num_rows * ROTARY // 2) / 7.0)
    q_TND = project(x, torch.view_as_real(cis).view(num_rows, ROTARY), cache, row_idx)
    untouched = torch.ones(200, dtype=torch.bool)
    untouched[row_idx] = False
    assert not cache[untouched].any()
    return torch.cat((q_TND.flatten(1), cache[row_idx]), dim=1)


def call_moe_output(kernels: Kernels, x: torch.Tensor, has_shared: bool) -> torch.Tensor:
    num_live = x.shape[0] - x.shape[0] // 3
    shared = (randn(HIDDEN, 34, seed=1), randn(17, HIDDEN, seed=2)) if has_shared else (None, None)
    output = kernels.moe_output(shared_gate_up_HW=shared[0], shared_down_WH=shared[1])
    y, weights = randn(33, TOPK, HIDDEN, seed=3)[:num_live], randn(33, TOPK, seed=4)[:num_live]
    out: torch.Tensor = output(x, y, weights)
    return out


def call_experts(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    """Row t goes to expert t % 3; the others are empty."""
    experts = kernels.experts(gate_up_EHW=randn(4, HIDDEN, 34, seed=1), down_EWH=randn(4, 17, HIDDEN, seed=2))
    group = torch.arange(x.shape[0]) % 3
    order = group.argsort(stable=True)
    out = torch.empty_like(x)
    out[order] = experts(x[order], torch.bincount(group, minlength=4).tolist())
    return out


CALLS: dict[str, Any] = {
    "linear": lambda kernels, x: kernels.linear(w_IO=randn(HIDDEN, 53, seed=1))(x),
    "swiglu": lambda kernels, x: kernels.swiglu(
        gate_up_HW=randn(HIDDEN, 34, seed=1), down_WH=randn(17, HIDDEN, seed=2)
    )(x),
    "latent_project": lambda kernels, x: call_latent(kernels, x, has_q_b=False),
    "latent_project with q_b": lambda kernels, x: call_latent(kernels, x, has_q_b=True),
    "latent_output": lambda kernels, x: kernels.latent_output(
        w_uv_NCV=randn(2, 18, VALUE, seed=1), o_proj=randn(2 * VALUE, HIDDEN, seed=2)
    )(torch.cat((x, x), dim=1)[:, :36].reshape(-1, 2, 18)),
    "router": lambda kernels, x: torch.cat(kernels.router(
        gate_HE=randn(HIDDEN, EXPERTS, seed=1), bias_E=None, scoring="softmax", num_topk=TOPK, num_groups=1,
        num_topk_groups=1, group_best=1, norm_topk_prob=True, scale=1.5,
    )(x), dim=1),
    "router with bias": lambda kernels, x: torch.cat(kernels.router(
        gate_HE=randn(HIDDEN, EXPERTS, seed=1), bias_E=randn(1, EXPERTS, seed=2)[0] * 0.1, scoring="sigmoid",
        num_topk=TOPK, num_groups=1, num_topk_groups=1, group_best=2, norm_topk_prob=False, scale=2.5,
    )(x), dim=1),
    "experts": call_experts,
    "moe_output": lambda kernels, x: call_moe_output(kernels, x, has_shared=True),
    "moe_output without shared": lambda kernels, x: call_moe_output(kernels, x, has_shared=False),
}  # fmt: skip


def test_every_made_op_is_called_here() -> None:
    assert {name.split()[0] for name in CALLS} == set(MADE) - {"program"}  # made of the others: tests/models


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_op_equals_the_composed_one(name: str, num_rows: int) -> None:
    x = randn(num_rows, HIDDEN, seed=9) * 3
    torch.testing.assert_close(CALLS[name](COMPILED, x), CALLS[name](REFERENCES, x), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", set(CALLS) - {"moe_output", "moe_output without shared"})
def test_a_rows_bits_do_not_depend_on_how_many_follow(name: str) -> None:
    x = randn(33, HIDDEN, seed=9) * 3
    whole = CALLS[name](COMPILED, x)
    for num_rows in ROW_COUNTS:
        assert torch.equal(CALLS[name](COMPILED, x[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("is_bfloat16", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("num_out", WIDTHS)
def test_a_product_adds_in_the_order_of_its_inputs_whatever_the_panels(num_out: int, is_bfloat16: bool) -> None:
    w, x = randn(29, num_out, is_bfloat16=is_bfloat16), randn(33, 29, seed=1)
    linear = COMPILED.linear(w_IO=w)
    want = (x.double() @ w.double()).float()
    for num_rows in ROW_COUNTS:
        got = linear(x[:num_rows])
        torch.testing.assert_close(got, want[:num_rows], rtol=CLOSE, atol=CLOSE)
        assert torch.equal(got, linear(x)[:num_rows])


def test_weights_are_kept_in_half_the_bytes_where_that_loses_nothing() -> None:
    exact, inexact = randn(8, 64, is_bfloat16=True), randn(8, 64)
    inexact[:, :63] = exact[:, :63]  # one column is enough
    packer = Packer()
    assert packer.pack(exact).is_bfloat16 == 1 and packer.pack(inexact).is_bfloat16 == 0
    x = torch.eye(8)
    for w in (exact, inexact):
        assert torch.equal(COMPILED.linear(w_IO=w)(x), w)


def test_special_values_survive_packing() -> None:
    w = torch.tensor([[0.0, -0.0, 1e-40, 3.389e38, -1e-30, 2.0**-133]]).bfloat16().float()
    assert torch.equal(COMPILED.linear(w_IO=w)(torch.ones(1, 1)), w)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, columns one after the other in memory."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("name", ["linear", "swiglu", "router", "moe_output", "latent_project"])
def test_how_rows_lie_in_memory_changes_nothing(name: str) -> None:
    x = randn(5, HIDDEN, seed=9)
    assert torch.equal(CALLS[name](COMPILED, turned(x)), CALLS[name](COMPILED, x))


def test_experts_read_rows_however_they_lie() -> None:
    experts = COMPILED.experts(gate_up_EHW=randn(2, HIDDEN, 34, seed=1), down_EWH=randn(2, 17, HIDDEN, seed=2))
    x = randn(5, HIDDEN, seed=9)
    assert torch.equal(experts(turned(x), [2, 3]), experts(x, [2, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_biases_are_read_as_float32_however_they_lie(dtype: torch.dtype) -> None:
    bias = (randn(EXPERTS, 2, seed=2) * 0.1).to(dtype)[:, 0]
    how = {"scoring": "sigmoid", "num_topk": TOPK, "num_groups": 1, "num_topk_groups": 1, "group_best": 2,
           "norm_topk_prob": False, "scale": 2.5}  # fmt: skip
    gate, x = randn(HIDDEN, EXPERTS, seed=1), randn(5, HIDDEN, seed=9)
    got = COMPILED.router(gate_HE=gate, bias_E=bias, **how)(x)
    want = REFERENCES.router(gate_HE=gate, bias_E=bias.float(), **how)(x)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e38])
@pytest.mark.parametrize("name", CALLS)
def test_a_row_that_is_not_finite_leaves_the_others_their_bits_and_reads_no_strange_memory(
    name: str, value: float
) -> None:
    x = randn(9, HIDDEN, seed=9) * 3
    want = CALLS[name](COMPILED, x)
    x[4] = value
    got = CALLS[name](COMPILED, x)
    others = torch.arange(9) != 4
    assert torch.equal(got[others], want[others])
    if name.startswith("router"):
        chosen = got[4, :TOPK]
        assert (chosen.diff() > 0).all() and chosen[0] >= 0 and chosen[-1] < EXPERTS
    elif math.isnan(value) and name != "moe_output without shared":  # which is made of y alone
        assert got[4].isnan().any()


def test_the_made_op_owns_its_weights() -> None:
    w = randn(16, 16)
    linear, x, want = COMPILED.linear(w_IO=w), randn(3, 16, seed=1), randn(3, 16, seed=1) @ w.clone()
    w.fill_(7.0)
    torch.testing.assert_close(linear(x), want, rtol=CLOSE, atol=CLOSE)
