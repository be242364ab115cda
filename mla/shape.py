"""Widths of latent attention, without torch: what a plan needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Widths of one latent attention layer, spelled as the checkpoints spell them."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    latent_norm_eps: float

    @property
    def row_dim(self) -> int:
        """Elements of one token's cache row: [latent | rotated key]."""
        return self.kv_lora_rank + self.qk_rope_head_dim
