"""One product a head, every backend: against float64, and by its bits."""

import pytest
import torch

import pegahpc.kernels.selected  # noqa: F401  (registers)
from pegahpc.kernels.matmul_rows import is_row_invariant
from pegahpc.kernels.registry import Place, backends_of, select

CPU = Place(device=torch.device("cpu"))
INVARIANT = Place(device=torch.device("cpu"), row_invariant=True)


def weights(num_heads: int, num_in: int, num_out: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_heads, num_in, num_out, generator=torch.Generator().manual_seed(1)).to(dtype)


def rows(num_heads: int, num_rows: int, num_in: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Strided, as attention hands them over: tokens outside, heads inside."""
    x = torch.randn(num_rows, num_heads, num_in, generator=torch.Generator().manual_seed(2)).to(dtype)
    return x.transpose(0, 1)


@pytest.mark.parametrize("backend", backends_of("matmul_heads", CPU))
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 16, 17, 129, 300])
def test_each_head_has_its_own_product(backend: str, num_rows: int) -> None:
    x, w = rows(3, num_rows, 37), weights(3, 37, 20)
    got = select("matmul_heads", CPU, backend)(x, w)
    assert got.shape == (3, num_rows, 20)
    want = torch.einsum("nti,nio->nto", x.double(), w.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", backends_of("matmul_heads", INVARIANT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 32, 64), (16, 512, 128), (5, 37, 20)])
def test_a_row_keeps_its_bits(backend: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    if backend == "even" and not is_row_invariant([shape], dtype):
        pytest.skip("needs a library whose products do not change with the row count")  # the engine asks the same
    product, w = select("matmul_heads", INVARIANT, backend), weights(*shape, dtype)
    x = rows(shape[0], 100, shape[1], dtype)
    whole = product(x, w)
    for count in (1, 2, 7, 38, 40, 99):
        assert torch.equal(product(x[:, :count], w), whole[:, :count])
        assert torch.equal(product(x[:, -count:], w), whole[:, -count:])


def test_weights_too_large_to_try_get_tiles() -> None:
    assert not is_row_invariant([(1, 8192, 4096)], torch.float32)
