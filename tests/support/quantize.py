"""The writing side of the weight formats, for tiny checkpoints: numpy only, and none of the code that reads them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8_block(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] to E4M3 codes and float32 scales, one a block: its largest magnitude becomes 448."""
    (rows, columns), (num_out, num_in) = block, weight.shape
    codes = torch.empty(num_out, num_in, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-num_out // rows), -(-num_in // columns))
    for z in range(scales.shape[0]):
        for y in range(scales.shape[1]):
            part = (slice(z * rows, (z + 1) * rows), slice(y * columns, (y + 1) * columns))
            scales[z, y] = weight[part].abs().max().clamp_min(1e-12) / 448
            codes[part] = (weight[part] / scales[z, y]).to(torch.float8_e4m3fn)
    return codes, scales


def int4_group(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] to int32 words of eight codes and bfloat16 scales, one for 32 inputs: the largest becomes code 7."""
    num_out, num_in = weight.shape
    groups = weight.float().view(num_out, num_in // 32, 32)
    scales = (groups.abs().amax(-1).clamp_min(1e-12) / 7).bfloat16()
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).int().view(num_out, num_in).numpy() + 8
    words = np.zeros((num_out, num_in // 8), dtype=np.uint32)
    for j in range(8):
        words |= codes[:, j::8].astype(np.uint32) << (4 * j)
    return torch.from_numpy(words.view(np.int32)), scales


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] to bytes of two E2M1 codes and E8M0 scales, one for 32 inputs: the nearest code, saturating at 6."""
    num_out, num_in = weight.shape
    groups: Floats = weight.double().numpy().reshape(num_out, num_in // 32, 32)
    largest = np.maximum(np.abs(groups).max(-1), 2.0**-100)
    exponents = np.floor(np.log2(largest)) - 2  # 4 is E2M1's largest power of two
    scaled = groups / 2.0 ** exponents[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - E2M1_MAGNITUDES).argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).reshape(num_out, num_in).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.from_numpy(packed), torch.from_numpy((exponents + 127).astype(np.uint8))


def read_fp8_block(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[out, in], float32, value by value."""
    (num_out, num_in), numbers = codes.shape, scales.double().numpy()
    spread = numbers[np.arange(num_out)[:, None] // block[0], np.arange(num_in)[None] // block[1]]
    return torch.from_numpy((codes.double().numpy() * spread).astype(np.float32))


def read_int4_group(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[out, in], float32, value by value."""
    bits = words.numpy().view(np.uint32)
    codes = np.stack([bits >> (4 * j) & 15 for j in range(8)], axis=-1).reshape(words.shape[0], -1)
    spread = np.repeat(scales.double().numpy(), 32, axis=1)
    return torch.from_numpy(((codes.astype(np.float64) - 8) * spread).astype(np.float32))


def read_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[out, in], float32, value by value."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(packed.shape[0], -1)
    values = E2M1_MAGNITUDES[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    spread = np.repeat(2.0 ** (scales.double().numpy() - 127), 32, axis=1)
    return torch.from_numpy((values * spread).astype(np.float32))
