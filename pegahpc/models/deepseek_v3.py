"""DeepSeek-V3 and Kimi-K2's text model: latent attention, sigmoid router with a selection bias (noaux_tc)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegahpc.mla.shape import LatentShape
from pegahpc.models.fields import Fields, UnsupportedModel
from pegahpc.models.spec import FFN, DenseFFN, ModelSpec, MoEFFN, Rope, Yarn
from pegahpc.moe.shape import RouterShape

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
MAX_LAYERS = 10_000  # a list of them is made; no model comes near
LATENT_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm keep this whatever rms_norm_eps says (official class)


def probe(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json of this line.

    Raises:
        UnsupportedModel: a field of another structure, missing, of a wrong type, or unknown.
    """
    fields = Fields(config)
    fields.pin("scoring_func", "sigmoid")
    fields.pin("topk_method", "noaux_tc")
    fields.pin("rope_interleave", True)
    num_experts = fields.take("n_routed_experts", int)
    router = RouterShape(
        num_experts=num_experts,
        num_topk=fields.take("num_experts_per_tok", int),
        scoring="sigmoid",
        method="noaux_tc",
        num_groups=fields.take("n_group", int, 1),
        num_topk_groups=fields.take("topk_group", int, 1),
        norm_topk_prob=fields.take("norm_topk_prob", bool, True),
        scale=fields.take("routed_scaling_factor", float),
    )
    num_mtp_layers = fields.take("num_nextn_predict_layers", int, 0)
    fields.inert("num_mtp_layers", "num_local_experts")
    return latent_moe_spec(fields, line="deepseek_v3", router=router, num_mtp_layers=num_mtp_layers)


def latent_moe_spec(fields: Fields, *, line: str, router: RouterShape, num_mtp_layers: int) -> ModelSpec:
    """What every DeepSeek line shares: latent attention, leading dense layers, then MoE layers."""
    fields.pin("hidden_act", "silu")
    fields.pin("attention_bias", False)
    fields.pin("mlp_bias", False)
    fields.pin("moe_layer_freq", 1)
    max_position = fields.take("max_position_embeddings", int)
    num_heads = fields.take("num_attention_heads", int)
    nope, rope_dim = fields.take("qk_nope_head_dim", int), fields.take("qk_rope_head_dim", int)
    fields.pin("head_dim", rope_dim)
    fields.pin("qk_head_dim", nope + rope_dim)
    rope = _rope(fields, dim=rope_dim, max_position=max_position)
    stretch = rope.yarn.magnitude(rope.yarn.mscale_all_dim) if rope.yarn else 1.0
    attention = LatentShape(
        num_heads=num_heads,
        q_lora_rank=fields.optional("q_lora_rank", int),
        kv_lora_rank=fields.take("kv_lora_rank", int),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.take("v_head_dim", int),
        softmax_scale=(nope + rope_dim) ** -0.5 * stretch * stretch,
        latent_norm_eps=LATENT_NORM_EPS,
    )
    spec = ModelSpec(
        line=line,
        hidden_size=fields.take("hidden_size", int),
        vocab_size=fields.take("vocab_size", int),
        max_position=max_position,
        rms_norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        attention=attention,
        rope=rope,
        ffns=_ffns(fields, router),
        num_mtp_layers=num_mtp_layers,
    )
    fields.finish()
    return spec


def _ffns(fields: Fields, router: RouterShape) -> tuple[FFN, ...]:
    width = fields.take("moe_intermediate_size", int)
    num_shared = fields.take("n_shared_experts", int, 0)
    dense = DenseFFN(intermediate_size=fields.take("intermediate_size", int))
    moe = MoEFFN(router=router, intermediate_size=width, shared_intermediate_size=num_shared * width)
    num_dense = fields.take("first_k_dense_replace", int, 0)
    num_layers = fields.take("num_hidden_layers", int)
    if num_layers > MAX_LAYERS:
        raise UnsupportedModel(f"config.json: num_hidden_layers is {num_layers}, above {MAX_LAYERS}")
    return tuple(dense if layer < num_dense else moe for layer in range(num_layers))


def _rope(fields: Fields, *, dim: int, max_position: int) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (as published)."""
    if dim < 2 or dim % 2:
        raise UnsupportedModel(f"config.json: qk_rope_head_dim is {dim}; rotary pairs need an even number, at least 2")
    theta = fields.optional("rope_theta", float)
    scaling = fields.nested("rope_scaling")
    merged = fields.nested("rope_parameters")
    if merged is not None and scaling is not None:
        raise UnsupportedModel("config.json: rope_parameters and rope_scaling are both given; keep one")
    if merged is not None:
        scaling, theta = merged, merged.take("rope_theta", float, theta)
    theta = 10000.0 if theta is None else theta
    if theta <= 1:
        raise UnsupportedModel(f"config.json: rope_theta is {theta}, not above 1")
    if scaling is None:
        return Rope(dim=dim, theta=theta, max_position=max_position)
    kind = scaling.optional("rope_type", str) or scaling.optional("type", str) or "default"
    scaling.inert("type", "rope_type", "rope_theta")
    yarn = None
    if kind == "yarn":
        yarn = Yarn(
            factor=scaling.take("factor", float),
            original_max_position=scaling.take("original_max_position_embeddings", int, max_position),
            beta_fast=scaling.take("beta_fast", float, 32.0),
            beta_slow=scaling.take("beta_slow", float, 1.0),
            mscale=scaling.optional("mscale", float),
            mscale_all_dim=scaling.optional("mscale_all_dim", float),
        )
    elif kind != "default":
        raise UnsupportedModel(f"config.json: rope type is {kind!r}; this line serves 'default' and 'yarn'")
    scaling.finish()
    return Rope(dim=dim, theta=theta, max_position=max_position, yarn=yarn)
