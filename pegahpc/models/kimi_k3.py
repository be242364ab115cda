"""Kimi K3's text model: Kimi Delta Attention, latent attention without positions, attention residuals, latent MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegahpc.models.fields import Fields, UnsupportedModel
from pegahpc.models.latent_moe import latent_shape, num_layers
from pegahpc.models.mixers import DeltaMixer, LatentMixer, Mixer
from pegahpc.models.quantization import check_divides, read_quantization
from pegahpc.models.spec import (
    FFN,
    AttentionResiduals,
    DenseFFN,
    LatentExperts,
    LayerSpec,
    ModelSpec,
    MoEFFN,
    Prediction,
    Situ,
    TensorNames,
)
from pegahpc.moe.shape import RouterShape

MODEL_TYPES = ("kimi_k3",)
TEXT_TYPE = "kimi_linear"
TOWERS = ("vision_tower.", "mm_projector.")
NAMES = TensorNames(moe="block_sparse_moe.", gate="w1", up="w3", down="w2")
# Positions are nowhere in this line; head_dim, pads and the training's own switches change nothing.
INERT = ("rope_theta", "rope_scaling", "rope_parameters", "head_dim", "use_grouped_topk", "kda_mode",
         "kda_unpad_inputs", "kda_use_fused_gate", "kda_chunk_impl", "kda_disable_recompute", "kda_conv_backend",
         "kda_transpose_state_layout", "situ_backend", "attn_res_triton")  # fmt: skip


def probe(config: Mapping[str, Any]) -> ModelSpec:
    """Read the config.json of the multimodal checkpoint, whose text model alone is served.

    Raises:
        UnsupportedModel: a field of another structure, missing, of a wrong type, or unknown.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", TEXT_TYPE) != TEXT_TYPE:
        raise UnsupportedModel(f"config.json: kimi_k3 has no text_config of model_type {TEXT_TYPE!r}")
    quantization = {name: config[name] for name in ("quantization_config",) if name in config}
    fields = Fields(quantization | dict(text), "config.json: text_config")
    fields.inert(*INERT)
    fields.pin("hidden_act", "situ")
    fields.pin("kda_use_qk_l2norm_in_kernel", True)
    situ = Situ(beta=fields.take("activation_situ_beta", float),
                linear_beta=fields.take("activation_situ_linear_beta", float))  # fmt: skip
    latent = _latent_mixer(fields)
    count = num_layers(fields)
    mixers, ffns = _mixers(fields, latent, count), _ffns(fields, situ, count)
    residuals = AttentionResiduals(block_size=fields.take("attn_res_block_size", int))
    if residuals.block_size < 1:
        raise fields.refusal(f"attn_res_block_size is {residuals.block_size}, below 1")
    num_mtp_layers = fields.take("num_nextn_predict_layers", int, 0)
    layer = LayerSpec(mixer=latent, ffn=ffns[-1])
    spec = ModelSpec(
        line="kimi_k3",
        hidden_size=fields.take("hidden_size", int),
        vocab_size=fields.take("vocab_size", int),
        max_position=fields.optional("model_max_length", int) or fields.take("max_position_embeddings", int),
        rms_norm_eps=fields.take("rms_norm_eps", float, 1e-5),
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, False),
        layers=tuple(LayerSpec(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)),
        residuals=residuals,
        prediction=Prediction(num_layers=num_mtp_layers, layer=layer, chains_normed=False) if num_mtp_layers else None,
        quantization=read_quantization(fields),
        names=NAMES,
        tensor_prefix="language_model.",
        other_towers=TOWERS,
    )
    fields.inert("max_position_embeddings")
    for ffn in {ffn for ffn in ffns if isinstance(ffn, MoEFFN)}:
        seen = ffn.latent.hidden_size if ffn.latent else spec.hidden_size
        check_divides(spec.quantization, routed_expert_hidden_size=seen, moe_intermediate_size=ffn.intermediate_size)
    fields.finish()
    return spec


def _latent_mixer(fields: Fields) -> LatentMixer:
    fields.pin("mla_use_nope", True)
    fields.pin("mla_use_output_gate", True)
    nope, rest = fields.take("qk_nope_head_dim", int), fields.take("qk_rope_head_dim", int)
    shape = latent_shape(fields, nope=nope, rope_dim=rest, scale=(nope + rest) ** -0.5)
    return LatentMixer(shape=shape, rope=None, has_output_gate=True)


def _mixers(fields: Fields, latent: LatentMixer, count: int) -> list[Mixer]:
    """By two lists of layers, counted from 1, that hold each layer once."""
    config = fields.nested("linear_attn_config")
    if config is None:
        raise fields.refusal("linear_attn_config is missing")
    config.pin("use_full_rank_gate", True)
    delta = DeltaMixer(
        num_heads=config.take("num_heads", int),
        head_dim=config.take("head_dim", int),
        num_taps=config.take("short_conv_kernel_size", int),
        lower_bound=config.take("gate_lower_bound", float),
    )
    if min(delta.width, delta.num_taps) < 1 or delta.lower_bound >= 0:
        raise config.refusal("num_heads, head_dim and short_conv_kernel_size are at least 1, gate_lower_bound below 0")
    deltas, latents = config.items("kda_layers", int) or (), config.items("full_attn_layers", int) or ()
    if sorted([*deltas, *latents]) != list(range(1, count + 1)):
        raise config.refusal(f"kda_layers and full_attn_layers do not name each of the layers 1 to {count} once")
    if not latents:
        raise config.refusal("full_attn_layers is empty; this line has latent attention in some layer")
    config.finish()
    return [delta if layer + 1 in deltas else latent for layer in range(count)]


def _ffns(fields: Fields, situ: Situ, count: int) -> list[FFN]:
    fields.pin("moe_layer_freq", 1)
    fields.pin("moe_router_activation_func", "sigmoid")
    fields.pin("topk_method", "noaux_tc")
    router = RouterShape(
        num_experts=fields.take("num_experts", int),
        num_topk=fields.take("num_experts_per_token", int),
        scoring="sigmoid",
        method="noaux_tc",
        num_groups=fields.take("num_expert_group", int, 1),
        num_topk_groups=fields.take("topk_group", int, 1),
        norm_topk_prob=fields.take("moe_renormalize", bool, True),
        scale=fields.take("routed_scaling_factor", float),
    )
    width = fields.take("moe_intermediate_size", int)
    moe = MoEFFN(
        router=router,
        intermediate_size=width,
        shared_intermediate_size=width * fields.take("num_shared_experts", int, 0),
        situ=situ,
        latent=LatentExperts(hidden_size=fields.take("routed_expert_hidden_size", int),
                             has_norm=fields.take("latent_moe_use_norm", bool, True)),
    )  # fmt: skip
    dense = DenseFFN(intermediate_size=fields.take("intermediate_size", int), situ=situ)
    num_dense = fields.take("first_k_dense_replace", int, 0)
    return [dense if layer < num_dense else moe for layer in range(count)]
