"""Packed weights, and what they read as. `weight_format.py` says how the formats lie in a checkpoint.

A matrix is [..., out, in]. `codes` and `scales` are the checkpoint's bytes, untouched; every function reads a matrix, a
stack of them, or a range of rows that starts where a row of scales does.
"""

# Shape suffixes: O = output features, I = input features; X and Y = codes and scales along the inputs,
# Z = scales along the outputs

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from pegahpc.kernels.weight_format import INT4_GROUP, MXFP4, WeightFormat

E4M3_NAN = 0x7F  # with either sign; E4M3 has no infinity
E8M0_NAN = 0xFF
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bit 3 of a code is the sign


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A matrix or a stack of matrices in a checkpoint's own format; shapes and types as `format.stored` says."""

    format: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor

    def __getitem__(self, matrix: int) -> Packed:
        """One matrix of a stack."""
        return Packed(format=self.format, codes=self.codes[matrix], scales=self.scales[matrix])


def unpack(packed: Packed) -> torch.Tensor:
    """[..., out, in], float32: code * scale, rounded once; exact wherever float32 holds the product."""
    scales_ZY = _e8m0(packed.scales) if packed.format == MXFP4 else packed.scales.float()
    rows, columns = packed.format.block
    if packed.format.codes_an_item == 1:
        values_OI = packed.codes.float()
        scales_ZI = scales_ZY.repeat_interleave(columns, dim=-1)[..., : values_OI.shape[-1]]
        for block, band_OI in enumerate(torch.split(values_OI, rows, dim=-2)):
            band_OI.mul_(scales_ZI[..., block : block + 1, :])
        return values_OI
    table = _int4_pairs() if packed.format == INT4_GROUP else _e2m1_pairs()
    bytes_OX = packed.codes.contiguous().view(torch.uint8)
    values = table.to(bytes_OX.device).index_select(0, bytes_OX.reshape(-1).int())
    values_OYG = values.view(*scales_ZY.shape, columns).mul_(scales_ZY.unsqueeze(-1))
    return values_OYG.flatten(-2)


def is_finite(packed: Packed) -> bool:
    """Whether every value that `unpack` gives is a finite number; cheap unless scales are near the end of float32."""
    if packed.format.codes_dtype == "F8_E4M3" and bool((packed.codes.view(torch.uint8) & 0x7F == E4M3_NAN).any()):
        return False
    if packed.format == MXFP4 and bool((packed.scales == E8M0_NAN).any()):
        return False
    scales = _e8m0(packed.scales) if packed.format == MXFP4 else packed.scales.float()
    if not scales.numel() or bool((scales.abs().amax() * packed.format.largest).isfinite()):
        return True
    return bool(scales.isfinite().all()) and bool(unpack(packed).isfinite().all())


@cache
def _int4_pairs() -> torch.Tensor:
    """[256, 2], float32: both values of a byte, the low nibble first."""
    byte = torch.arange(256)
    return torch.stack((byte % 16 - 8, byte // 16 - 8), dim=-1).float()


@cache
def _e2m1_pairs() -> torch.Tensor:
    """[256, 2], float32: both values of a byte, the low nibble first."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    byte = torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), dim=-1)


@cache
def _e8m0_values() -> torch.Tensor:
    """[256], float32: 2^(code - 127), the smallest of them subnormal; the last code is no number."""
    values = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).float()
    values[E8M0_NAN] = float("nan")
    return values


def _e8m0(scales: torch.Tensor) -> torch.Tensor:
    table = _e8m0_values().to(scales.device)
    return table.index_select(0, scales.view(torch.uint8).reshape(-1).int()).view(scales.shape)
