"""Rotary positions of a line, as data. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's stretch of the rotary frequencies. Source: arXiv:2309.00071; field names of the DeepSeek checkpoints."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def magnitude(self, mscale: float | None) -> float:
        """0.1 * mscale * ln(factor) + 1; 1 without a stretch or an mscale of 0 or None."""
        if self.factor <= 1 or not mscale:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def cis_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions over interleaved pairs."""

    dim: int
    theta: float
    max_position: int
    yarn: Yarn | None = None
