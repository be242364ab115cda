"""One product a head: y[n] = x[n] @ w[n], with w stored [heads, in, out]. Row-invariance as in matmul_rows."""

# Shape suffixes: N = heads, T = rows, I = input features, O = output features

from __future__ import annotations

import torch

from pegahpc.kernels.matmul_rows import EVEN_CHUNK, ROW_TILE
from pegahpc.kernels.registry import register


@register("matmul_heads", "torch")
def matmul_heads_tiles(x_NTI: torch.Tensor, w_NIO: torch.Tensor) -> torch.Tensor:
    """Fixed tiles of 16 rows, the last one padded with zeros: row-invariant by construction, and the reference."""
    num_rows = x_NTI.shape[1]
    padded = x_NTI.new_zeros(x_NTI.shape[0], -(-num_rows // ROW_TILE) * ROW_TILE, x_NTI.shape[2])
    padded[:, :num_rows] = x_NTI
    tiles = [torch.bmm(tile, w_NIO) for tile in torch.split(padded, ROW_TILE, dim=1)] if num_rows else []
    return torch.cat(tiles, dim=1)[:, :num_rows] if tiles else x_NTI.new_empty(w_NIO.shape[0], 0, w_NIO.shape[2])


@register("matmul_heads", "even", priority=10, supports=lambda place: place.device.type == "cpu")
def matmul_heads_even(x_NTI: torch.Tensor, w_NIO: torch.Tensor) -> torch.Tensor:
    """One call for 2 to 128 rows, an odd count padded by one. Row-invariant where `is_row_invariant` says so."""
    num_rows = x_NTI.shape[1]
    if num_rows <= EVEN_CHUNK and not num_rows % 2:
        return torch.bmm(x_NTI, w_NIO)
    if num_rows % 2:
        x_NTI = torch.cat((x_NTI, x_NTI[:, :1]), dim=1)
    chunks = [torch.bmm(chunk, w_NIO) for chunk in torch.split(x_NTI, EVEN_CHUNK, dim=1)]
    return torch.cat(chunks, dim=1)[:, :num_rows]


@register("matmul_heads", "bmm", priority=5, supports=lambda place: not place.row_invariant)
def matmul_heads_bmm(x_NTI: torch.Tensor, w_NIO: torch.Tensor) -> torch.Tensor:
    """The library's own choice for any count of rows."""
    return torch.bmm(x_NTI, w_NIO)
