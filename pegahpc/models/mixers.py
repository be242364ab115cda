"""Token mixers of the lines, as data: latent attention, sparse or not, and Kimi Delta Attention. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pegahpc.mla.shape import LatentShape
from pegahpc.models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """DeepSeek sparse attention's choice of the tokens that a row sees.

    score(t, s) = sum over heads of weights_proj(x_t)_h * num_heads^-0.5 * relu(q_h . k_s * head_dim^-0.5), q from the
    normed query latent, k = LayerNorm(wk(x)) with a bias, both with their first `rope_dim` dims rotated as interleaved
    pairs; of the tokens up to its own position a row sees the `topk` best, ties to the earliest, and all while there
    are no more. Its keys are an Append group of `head_dim` elements a token.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), section 2.1; the layout of transformers' glm_moe_dsa.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    topk: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class LatentMixer:
    """Multi-head latent attention: an Append group of rows [latent | key], on one page table in all layers."""

    shape: LatentShape
    rope: Rope | None  # None: no positions (NoPE); the qk_rope_head_dim dims are there and are not rotated
    indexer: Indexer | None = None  # None: a row sees its whole context
    is_indexer_shared: bool = False  # no indexer weights or keys here: the choice of the last layer that has its own
    has_output_gate: bool = False  # o_proj(attention * sigmoid(g_proj(x))), g_proj of all heads' v_head_dim

    @property
    def has_own_indexer(self) -> bool:
        """Whether the layer has indexer weights and caches indexer keys."""
        return self.indexer is not None and not self.is_indexer_shared


@dataclass(frozen=True, kw_only=True)
class DeltaMixer:
    """Kimi Delta Attention: a State group of a float32 matrix [head_dim, head_dim] a head, and convolution windows.

    q, k, v = silu(causal depthwise convolution of num_taps rows); q, k l2-normed (eps 1e-6 in the sum), q by
    head_dim^-0.5; decay = exp(lower_bound * sigmoid(exp(A_log) * (f_b(f_a(x)) + dt_bias))), a channel of k each;
    beta = sigmoid(b_proj(x)); state <- state decayed, then + beta * (v - state k) k^T; out = o_proj(rms(state q;
    o_norm) * sigmoid(g_proj(x))).

    Source: Kimi Linear (arXiv:2510.26692), section 3; the bounded decay and the full-rank gate are K3's.
    """

    num_heads: int
    head_dim: int
    num_taps: int  # short_conv_kernel_size
    lower_bound: float  # gate_lower_bound, below 0

    @property
    def width(self) -> int:
        """All heads."""
        return self.num_heads * self.head_dim

    @property
    def padded_heads(self) -> int:
        """Entries of A_log on disk: the heads, zero-padded to a multiple of 128."""
        return -(-self.num_heads // 128) * 128

    def state_bytes(self, item: int) -> int:
        """One request's state in one layer: float32 matrices, and windows of items so many bytes wide."""
        return self.width * self.head_dim * 4 + 3 * (self.num_taps - 1) * self.width * item


Mixer = LatentMixer | DeltaMixer
