"""The sizes that train: a micro one for tests, one for a laptop, and the one that was shipped."""

from __future__ import annotations

from dataclasses import dataclass

ROUTED_SCALING_FACTOR = 1.5
ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-6
MAX_POSITIONS = 2048  # of the exported config; training windows are shorter


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """The widths of a deepseek_v3 network, named as config.json names them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key, the rotated part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A network and how it is trained."""

    shape: NetworkShape
    window: int  # tokens of one training row
    batch_size: int  # rows of one step
    num_steps: int
    num_warmup_steps: int = 50
    learning_rate: float = 4e-3
    weight_decay: float = 0.1  # of matrices; norms have none
    mtp_loss_weight: float = 0.3
    bias_update: float = 1e-3  # of the router's selection bias, falling to 0 over the run
    max_grad_norm: float = 1.0


MICRO = Preset(
    shape=NetworkShape(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    window=32,
    batch_size=4,
    num_steps=20,
    num_warmup_steps=4,
)
LAPTOP = Preset(
    shape=NetworkShape(
        vocab_size=1024,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        intermediate_size=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
    window=256,
    batch_size=4,
    num_steps=1500,
)
SHIPPED = Preset(
    shape=NetworkShape(
        vocab_size=3072,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=704,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    ),
    window=512,
    batch_size=128,
    num_steps=6232,
)
PRESETS = {"micro": MICRO, "laptop": LAPTOP, "shipped": SHIPPED}
