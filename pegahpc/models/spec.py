"""A model line as data: what the decoder builds, what the loader reads, what a plan counts. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pegahpc.mla.shape import LatentShape
from pegahpc.moe.shape import RouterShape


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


@dataclass(frozen=True, kw_only=True)
class DenseFFN:
    """SwiGLU of this width."""

    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class MoEFFN:
    """Routed SwiGLU experts of this width, and a shared one (0: none) that every token visits."""

    router: RouterShape
    intermediate_size: int
    shared_intermediate_size: int


FFN = DenseFFN | MoEFFN


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One checkpoint's model, whatever its line."""

    line: str
    hidden_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention: LatentShape
    rope: Rope
    ffns: tuple[FFN, ...]  # one a layer
    num_mtp_layers: int  # layers on disk after the last; not served
    tensor_prefix: str = ""  # before "model." and "lm_head." in the checkpoint's names

    @property
    def num_layers(self) -> int:
        """Decoder layers, without multi-token-prediction layers."""
        return len(self.ffns)

    @property
    def num_experts(self) -> int:
        """Routed experts of a MoE layer; 0 for a dense model."""
        return max((ffn.router.num_experts for ffn in self.ffns if isinstance(ffn, MoEFFN)), default=0)
