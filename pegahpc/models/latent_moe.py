"""What the lines of DeepSeek's family share: latent attention with rotary positions, dense layers, then MoE layers."""

from __future__ import annotations

from pegahpc.mla.shape import LatentShape
from pegahpc.models.fields import Fields, UnsupportedModel
from pegahpc.models.mixers import LatentMixer
from pegahpc.models.quantization import check_divides, read_quantization
from pegahpc.models.rope import Rope, Yarn
from pegahpc.models.spec import FFN, DenseFFN, LayerSpec, ModelSpec, MoEFFN, Prediction
from pegahpc.moe.shape import RouterShape

MAX_LAYERS = 10_000  # a list of them is made; no model comes near
LATENT_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm keep this whatever rms_norm_eps says (official classes)


def noaux_router(fields: Fields) -> RouterShape:
    """The sigmoid router with a selection bias, as DeepSeek-V3 spells it."""
    fields.pin("scoring_func", "sigmoid")
    fields.pin("topk_method", "noaux_tc")
    return RouterShape(
        num_experts=fields.take("n_routed_experts", int),
        num_topk=fields.take("num_experts_per_tok", int),
        scoring="sigmoid",
        method="noaux_tc",
        num_groups=fields.take("n_group", int, 1),
        num_topk_groups=fields.take("topk_group", int, 1),
        norm_topk_prob=fields.take("norm_topk_prob", bool, True),
        scale=fields.take("routed_scaling_factor", float),
    )


def rotary_mixer(fields: Fields) -> LatentMixer:
    """Latent attention over the whole context; `head_dim` is left to the line."""
    fields.pin("attention_bias", False)
    nope, rope_dim = fields.take("qk_nope_head_dim", int), fields.take("qk_rope_head_dim", int)
    fields.pin("qk_head_dim", nope + rope_dim)
    rope = _rope(fields, dim=rope_dim, max_position=fields.take("max_position_embeddings", int))
    stretch = rope.yarn.magnitude(rope.yarn.mscale_all_dim) if rope.yarn else 1.0
    scale = (nope + rope_dim) ** -0.5 * stretch * stretch
    return LatentMixer(shape=latent_shape(fields, nope=nope, rope_dim=rope_dim, scale=scale), rope=rope)


def latent_shape(fields: Fields, *, nope: int, rope_dim: int, scale: float) -> LatentShape:
    """The widths of latent attention."""
    return LatentShape(
        num_heads=fields.take("num_attention_heads", int),
        q_lora_rank=fields.optional("q_lora_rank", int),
        kv_lora_rank=fields.take("kv_lora_rank", int),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.take("v_head_dim", int),
        softmax_scale=scale,
        latent_norm_eps=LATENT_NORM_EPS,
    )


def num_layers(fields: Fields) -> int:
    """How many layers, within what is sane."""
    count = fields.take("num_hidden_layers", int)
    if count > MAX_LAYERS:
        raise fields.refusal(f"num_hidden_layers is {count}, above {MAX_LAYERS}")
    if count < 1:
        raise fields.refusal(f"num_hidden_layers is {count}, below 1")
    return count


def ffn_kinds(fields: Fields, router: RouterShape) -> tuple[DenseFFN, MoEFFN]:
    """A dense layer's FFN and a MoE layer's."""
    fields.pin("hidden_act", "silu")
    fields.pin("mlp_bias", False)
    fields.pin("moe_layer_freq", 1)
    width = fields.take("moe_intermediate_size", int)
    num_shared = fields.take("n_shared_experts", int, 0)
    dense = DenseFFN(intermediate_size=fields.take("intermediate_size", int))
    return dense, MoEFFN(router=router, intermediate_size=width, shared_intermediate_size=num_shared * width)


def leading_dense(fields: Fields, router: RouterShape) -> tuple[FFN, ...]:
    """Dense layers first, then MoE layers."""
    dense, moe = ffn_kinds(fields, router)
    num_dense = fields.take("first_k_dense_replace", int, 0)
    return tuple(dense if layer < num_dense else moe for layer in range(num_layers(fields)))


def model_spec(
    fields: Fields, *, line: str, layers: tuple[LayerSpec, ...], prediction: Prediction | None = None
) -> ModelSpec:
    """The rest of the fields, and the end of them.

    Raises:
        UnsupportedModel: a field that nobody knows, or widths that the packed format cannot have.
    """
    mixer = layers[0].mixer
    assert isinstance(mixer, LatentMixer) and mixer.rope is not None
    spec = ModelSpec(
        line=line,
        hidden_size=fields.take("hidden_size", int),
        vocab_size=fields.take("vocab_size", int),
        max_position=mixer.rope.max_position,
        rms_norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        layers=layers,
        prediction=prediction,
        quantization=read_quantization(fields),
    )
    widths = {ffn.intermediate_size for ffn in spec.ffns if isinstance(ffn, MoEFFN)}
    check_divides(spec.quantization, hidden_size=spec.hidden_size, moe_intermediate_size=max(widths, default=0))
    fields.finish()
    return spec


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
