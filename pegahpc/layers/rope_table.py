"""Tables of rotary angles: cos and sin of every position, YaRN included."""

from __future__ import annotations

import math

import torch

from pegahpc.models.rope import Rope, Yarn


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """[dim / 2], float32: turns a token of each pair, 1 / theta^(2i / dim), stretched where YaRN says.

    Source: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071), section 3.2, with the bounds of the DeepSeek code.
    """
    power = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    extrapolated = 1.0 / rope.theta**power
    if rope.yarn is None:
        return extrapolated
    interpolated = 1.0 / (rope.yarn.factor * rope.theta**power)
    low, high = _ramp_bounds(rope, rope.yarn)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return interpolated * ramp + extrapolated * (1 - ramp)


def _ramp_bounds(rope: Rope, yarn: Yarn) -> tuple[float, float]:
    """Pairs below `low` keep their frequency, pairs above `high` are interpolated."""

    def pair_of(num_turns: float) -> float:
        wavelength = yarn.original_max_position / (num_turns * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), rope.dim - 1)
    return low, high + 0.001 if low == high else high


def cis_table(rope: Rope, num_positions: int) -> torch.Tensor:
    """[num_positions, dim], float32: (cos, sin) of each pair, interleaved, times YaRN's magnitude."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    scale = rope.yarn.cis_scale if rope.yarn else 1.0
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=-1).flatten(1)
