"""Matrix products over rows: y = x @ w, with w stored [in, out].

A row-invariant backend gives a row the same bits whatever other rows stand beside it. BLAS libraries choose their
kernel by the number of rows, so that is no matter of course: measured with MKL 2024.2 (AVX-512, float32), [in, out]
weights give one set of bits for 1 row and another for every count from 2 to 128; from about 200 rows on, K of 1,408
and more splits differently. Weights stored [out, in] have three such sets.
"""

# Shape suffixes: T = rows, I = input features, O = output features, E = experts

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from pegahpc.kernels.registry import register

ROW_TILE = 16
EVEN_CHUNK = 128
MAX_TRIED_BYTES = 64 << 20


@register("matmul_rows", "torch")
def matmul_rows_tiles(x_TI: torch.Tensor, w_IO: torch.Tensor) -> torch.Tensor:
    """Fixed tiles of 16 rows, the last one padded with zeros: row-invariant by construction, and the reference."""
    num_rows = x_TI.shape[0]
    padded = x_TI.new_zeros(-(-num_rows // ROW_TILE) * ROW_TILE, x_TI.shape[1])
    padded[:num_rows] = x_TI
    tiles = [tile @ w_IO for tile in torch.split(padded, ROW_TILE)] if num_rows else []
    return torch.cat(tiles)[:num_rows] if tiles else x_TI.new_empty(0, w_IO.shape[1])


@register("matmul_rows", "even", priority=10, supports=lambda place: place.device.type == "cpu")
def matmul_rows_even(x_TI: torch.Tensor, w_IO: torch.Tensor) -> torch.Tensor:
    """One product for 2 to 128 rows, an odd count padded by one. Row-invariant where `is_row_invariant` says so."""
    num_rows = x_TI.shape[0]
    if num_rows <= EVEN_CHUNK and not num_rows % 2:  # a step's own rows: the common case, without the cost of a split
        return x_TI @ w_IO
    if num_rows % 2:
        x_TI = torch.cat((x_TI, x_TI[:1]))
    chunks = torch.split(x_TI, EVEN_CHUNK)
    out_TO = chunks[0] @ w_IO if len(chunks) == 1 else torch.cat([chunk @ w_IO for chunk in chunks])
    return out_TO[:num_rows]


@register("matmul_rows", "mm", priority=5, supports=lambda place: not place.row_invariant)
def matmul_rows_mm(x_TI: torch.Tensor, w_IO: torch.Tensor) -> torch.Tensor:
    """The library's own choice for any count of rows."""
    return x_TI @ w_IO


def is_row_invariant(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> bool:
    """Whether a product of every even row count up to 128 gives each row the same bits, for these weights here.

    Asked once, when an engine is built with row invariance; costs half a second for a small model. Large weights
    are not tried (a copy of each would be made): the answer for them is no.

    Args:
        shapes: (batch, in, out) of each weight; batch 1 is a plain product, more are one product a head.
    """
    generator = torch.Generator().manual_seed(0)
    if any(prod(shape) * dtype.itemsize > MAX_TRIED_BYTES for shape in shapes):
        return False
    for num_heads, num_in, num_out in set(shapes):
        w_NIO = torch.randn(num_heads, num_in, num_out, generator=generator).to(dtype)
        x_NTI = torch.randn(num_heads, EVEN_CHUNK, num_in, generator=generator).to(dtype)
        whole_NTO = _product(x_NTI, w_NIO)
        for num_rows in range(2, EVEN_CHUNK, 2):
            head_NTO = _product(x_NTI[:, :num_rows], w_NIO)
            tail_NTO = _product(x_NTI[:, -num_rows:], w_NIO)
            if not torch.equal(head_NTO, whole_NTO[:, :num_rows]):
                return False
            if not torch.equal(tail_NTO, whole_NTO[:, -num_rows:]):
                return False
    return True


def _product(x_NTI: torch.Tensor, w_NIO: torch.Tensor) -> torch.Tensor:
    return (x_NTI[0] @ w_NIO[0])[None] if w_NIO.shape[0] == 1 else torch.bmm(x_NTI, w_NIO)
