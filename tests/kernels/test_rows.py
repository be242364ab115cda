"""Norm, products, SwiGLU, routed experts and weighted sums: every backend against float64, and its bits by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pegahpc.kernels.matmul_rows as matmul_module
from pegahpc.kernels.matmul_rows import is_row_invariant
from pegahpc.kernels.registry import Place, backends_of, select
from pegahpc.kernels.selected import PLAIN

CPU = Place(device=torch.device("cpu"))
INVARIANT = Place(device=torch.device("cpu"), row_invariant=True)
EPS = 1e-6
# float32 accumulates up to 200 products of size about 1: a few units of 2^-24 of the sum's size.
CLOSE = 2e-5
ROW_COUNTS = [0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 33, 129, 200]
SLICES = [slice(0, 1), slice(0, 2), slice(3, 4), slice(5, 12), slice(20, 37), slice(1, 132), slice(139, 140)]


def cases(place: Place, *ops: str) -> list[tuple[str, str]]:
    return [(op, backend) for op in ops for backend in backends_of(op, place)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def silu64(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x) in float64, without overflow: x e^x / (1 + e^x) below 0."""
    x64 = x.double()
    small = (-x64.abs()).exp()
    return torch.where(x64 >= 0, x64 / (1 + small), x64 * small / (1 + small))


@pytest.mark.parametrize("backend", backends_of("rms_norm", CPU))
@pytest.mark.parametrize("hidden", [1, 15, 16, 37, 256])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_rms_norm_matches_float64(backend: str, hidden: int, num_rows: int) -> None:
    x, weight = randn(num_rows, hidden) * 3, randn(hidden, seed=1)
    got = select("rms_norm", CPU, backend)(x, weight, EPS)
    want = [[v / (sum(u * u for u in row) / hidden + EPS) ** 0.5 * w for v, w in zip(row, weight.tolist(), strict=True)]
            for row in x.tolist()]  # fmt: skip
    assert got.shape == (num_rows, hidden) and got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), torch.tensor(want, dtype=torch.float64).view(num_rows, hidden), rtol=CLOSE, atol=CLOSE
    )


@pytest.mark.parametrize("backend", backends_of("rms_norm", CPU))
def test_rms_norm_reads_rows_that_are_a_slice_of_wider_ones(backend: str) -> None:
    wide, weight = randn(5, 60), randn(37, seed=1)
    norm = select("rms_norm", CPU, backend)
    assert torch.equal(norm(wide[:, 11:48], weight, EPS), norm(wide[:, 11:48].contiguous(), weight, EPS))


@pytest.mark.parametrize("backend", backends_of("rms_norm", CPU))
def test_rms_norm_of_a_zero_row_is_zero_and_of_a_poisoned_row_is_not_finite(backend: str) -> None:
    x = torch.zeros(3, 37)
    x[2, 36] = float("nan")
    got = select("rms_norm", CPU, backend)(x, torch.ones(37), EPS)
    assert not got[:2].any() and got[2].isnan().all()


def test_rms_norm_in_bfloat16_rounds_before_the_weight() -> None:
    bf16 = Place(device=torch.device("cpu"), dtype=torch.bfloat16)
    x, weight = randn(9, 37).bfloat16(), randn(37, seed=1).bfloat16()
    normed = (x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()).bfloat16()
    for backend in backends_of("rms_norm", bf16):
        assert torch.equal(select("rms_norm", bf16, backend)(x, weight, EPS), normed * weight)


@pytest.mark.parametrize("backend", backends_of("matmul_rows", CPU))
@pytest.mark.parametrize(("num_in", "num_out"), [(37, 20), (1, 1), (20, 37), (64, 16), (96, 300)])
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_products_match_float64(backend: str, num_in: int, num_out: int, num_rows: int) -> None:
    x, w = randn(num_rows, num_in), randn(num_in, num_out, seed=1)
    got = select("matmul_rows", CPU, backend)(x, w)
    assert got.shape == (num_rows, num_out) and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.einsum("ti,io->to", x.double(), w.double()), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("backend", backends_of("matmul_rows", CPU))
@pytest.mark.parametrize("num_rows", [1, 2, 5, 140])
def test_products_read_rows_that_are_a_slice_of_wider_ones(backend: str, num_rows: int) -> None:
    wide, w = randn(num_rows, 60), randn(37, 20, seed=1)
    got = select("matmul_rows", CPU, backend)(wide[:, 11:48], w)
    torch.testing.assert_close(got.double(), wide[:, 11:48].double() @ w.double(), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("backend", backends_of("silu_and_mul", CPU))
@pytest.mark.parametrize("width", [1, 16, 20, 37])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_swiglu_matches_float64(backend: str, width: int, num_rows: int) -> None:
    gate_up = randn(num_rows, 2 * width) * 4
    got = select("silu_and_mul", CPU, backend)(gate_up)
    assert got.shape == (num_rows, width)
    torch.testing.assert_close(
        got.double(), silu64(gate_up[:, :width]) * gate_up[:, width:].double(), rtol=3e-6, atol=3e-6
    )


@pytest.mark.parametrize("backend", backends_of("silu_and_mul", CPU))
def test_swiglu_reads_rows_that_are_a_slice_of_wider_ones(backend: str) -> None:
    wide, swiglu = randn(5, 60), select("silu_and_mul", CPU, backend)
    for rows in (slice(0, 1), slice(0, 5)):
        assert torch.equal(swiglu(wide[rows, 3:43]), swiglu(wide[rows, 3:43].clone()))


@pytest.mark.parametrize("backend", backends_of("silu_and_mul", CPU))
@pytest.mark.parametrize("width", [16, 37])
def test_swiglu_holds_where_the_exponential_leaves_float32(backend: str, width: int) -> None:
    values = [0.0, -0.0, 80.0, -80.0, 88.8, -88.8, 200.0, -200.0, 1e30, -1e30, 1e-30]
    gate = torch.tensor([[value] * width for value in values])
    got = select("silu_and_mul", CPU, backend)(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    torch.testing.assert_close(got.double(), 2 * silu64(gate), rtol=3e-6, atol=1e-6)


GROUPS = {
    "all rows to one expert": [0, 0, 23, 0],
    "one row an expert": [1, 1, 1, 1],
    "odd counts and an empty one": [3, 0, 7, 1],
    "the first and the last": [5, 0, 0, 17],
    "a group above a chunk": [131, 2, 0, 1],
    "one row": [0, 1, 0, 0],
    "none": [0, 0, 0, 0],
}


@pytest.mark.parametrize("backend", backends_of("grouped_swiglu", CPU))
@pytest.mark.parametrize(("hidden", "width"), [(37, 20), (64, 32)])
@pytest.mark.parametrize("groups", GROUPS)
def test_routed_experts_match_one_row_at_a_time_in_float64(backend: str, hidden: int, width: int, groups: str) -> None:
    sizes = GROUPS[groups]
    x = randn(sum(sizes), hidden)
    gate_up, down = randn(4, hidden, 2 * width, seed=1) / hidden**0.5, randn(4, width, hidden, seed=2) / width**0.5
    got = select("grouped_swiglu", CPU, backend)(x, gate_up, down, sizes)
    assert got.shape == x.shape
    experts = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    for row, expert in enumerate(experts):
        both = x[row].double() @ gate_up[expert].double()
        want = (silu64(both[:width]) * both[width:]) @ down[expert].double()
        torch.testing.assert_close(got[row].double(), want, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("backend", backends_of("weighted_sum", CPU))
@pytest.mark.parametrize(("num_topk", "hidden"), [(1, 37), (3, 20), (8, 16)])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_weighted_sums_match_float64(backend: str, num_topk: int, hidden: int, num_rows: int) -> None:
    y, weights = randn(num_rows, num_topk, hidden), randn(num_rows, num_topk, seed=1)
    got = select("weighted_sum", CPU, backend)(y, weights)
    assert got.shape == (num_rows, hidden) and got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), torch.einsum("tkh,tk->th", y.double(), weights.double()), rtol=CLOSE, atol=CLOSE
    )


ROWS = 140
ARGUMENTS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "rms_norm": lambda x: (x, randn(37, seed=1), EPS),
    "matmul_rows": lambda x: (x, randn(37, 20, seed=1)),
    "silu_and_mul": lambda x: (torch.cat((x, x.flip(1)), dim=1),),
    "grouped_swiglu": lambda x: (x, randn(1, 37, 40, seed=1), randn(1, 20, 37, seed=2), [x.shape[0]]),
    "weighted_sum": lambda x: (torch.stack((x, x + 1, x * x), dim=1), x[:, :3].contiguous()),
}


@pytest.mark.parametrize(("op", "backend"), cases(INVARIANT, *ARGUMENTS))
def test_a_row_keeps_its_bits_whatever_stands_beside_it(op: str, backend: str) -> None:
    kernel, x = select(op, INVARIANT, backend), randn(ROWS, 37)
    if backend == "even" and not is_row_invariant([(1, 37, 20), (1, 37, 40), (1, 20, 37)], torch.float32):
        pytest.skip("needs a library whose products do not change with the row count")  # the engine asks the same
    whole = kernel(*ARGUMENTS[op](x))
    for rows in SLICES:
        assert torch.equal(kernel(*ARGUMENTS[op](x[rows].contiguous())), whole[rows]), rows


@pytest.mark.parametrize("backend", backends_of("grouped_swiglu", INVARIANT))
def test_a_row_keeps_its_bits_whatever_the_other_experts_have(backend: str) -> None:
    kernel, x = select("grouped_swiglu", INVARIANT, backend), randn(ROWS, 37)
    weights = (randn(3, 37, 40, seed=1), randn(3, 20, 37, seed=2))
    alone = kernel(x[:9], *weights, [0, 9, 0])
    assert torch.equal(kernel(torch.cat((x[100:], x[:9])), *weights, [40, 9, 0])[40:], alone)
    assert torch.equal(kernel(torch.cat((x[:9], x[50:])), *weights, [0, 9, 90])[:9], alone)


@pytest.mark.parametrize(("op", "backend"), cases(INVARIANT, *ARGUMENTS))
def test_a_poisoned_row_poisons_nobody(op: str, backend: str) -> None:
    kernel, x = select(op, INVARIANT, backend), randn(8, 37)
    clean = kernel(*ARGUMENTS[op](x))
    x[3] = float("nan")
    got = kernel(*ARGUMENTS[op](x))
    assert got[3].isnan().all()
    assert torch.equal(got[[0, 1, 2, 4, 5, 6, 7]], clean[[0, 1, 2, 4, 5, 6, 7]])


def test_products_of_this_library_are_found_row_invariant_or_not_without_a_doubt() -> None:
    shapes = [(1, 37, 20), (3, 16, 24)]
    assert is_row_invariant(shapes, torch.float32) == is_row_invariant(shapes, torch.float32)


def test_a_product_that_changes_with_the_row_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.stack([row @ head for row in rows]) for rows, head in zip(x, w, strict=True)])

    def short_counts_differ(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return exact(x, w) + (x.shape[1] == 6) * 1e-7

    def the_last_row_differs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = exact(x, w)
        out[:, -1] += (x.shape[1] < 128) * 1e-5
        return out

    for product, expected in ((exact, True), (short_counts_differ, False), (the_last_row_differs, False)):
        monkeypatch.setattr(matmul_module, "_product", product)
        assert is_row_invariant([(1, 5, 3), (2, 4, 3)], torch.float32) is expected


def test_every_op_with_rows_is_covered_here_or_in_a_file_of_its_own() -> None:
    others = {"grouped_swiglu_packed", "latent_attention", "latent_rows", "matmul_heads", "route_tokens"}
    assert set(ARGUMENTS) | others == set(PLAIN)
