"""What a line calls the tensors of its parts, with their shapes: from the model's data alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pegahpc.models.mixers import DeltaMixer, LatentMixer, Mixer
from pegahpc.models.spec import FFN, LayerSpec, ModelSpec, MoEFFN

# safetensors' names of the types that a plain tensor may have, the usual one first
F32 = ("F32", "BF16", "F16")
BF16 = ("BF16", "F32", "F16")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor `name` of this shape, or, where it is packed, the tensors of a format in its place."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = BF16  # that are read where it is not packed; the first is the usual one
    packs: str = "never"  # or "body": attention and FFNs that all ranks hold; "expert": routed experts
    is_float32: bool = False  # an engine holds it in float32, whatever its own type


def layer_prefix(spec: ModelSpec, layer: int) -> str:
    """Before the names of a layer's tensors; multi-token-prediction layers are numbered on after the last."""
    return f"{spec.tensor_prefix}model.layers.{layer}."


def model_parts(spec: ModelSpec) -> Iterator[Part]:
    """Everything outside the layers, by its full name."""
    prefix, hidden = spec.tensor_prefix, spec.hidden_size
    yield Part(name=f"{prefix}model.embed_tokens.weight", shape=(spec.vocab_size, hidden))
    yield Part(name=f"{prefix}model.norm.weight", shape=(hidden,))
    if not spec.tie_word_embeddings:
        yield Part(name=f"{prefix}lm_head.weight", shape=(spec.vocab_size, hidden))
    if spec.residuals:
        yield Part(name=f"{prefix}model.output_attn_res_norm.weight", shape=(hidden,))
        yield Part(name=f"{prefix}model.output_attn_res_proj.weight", shape=(1, hidden))


def layer_parts(spec: ModelSpec, layer: LayerSpec) -> Iterator[Part]:
    """What of a decoder layer every rank holds, by its names inside the layer: all but routed experts."""
    hidden = spec.hidden_size
    yield from _mixer(layer.mixer, hidden)
    yield Part(name="input_layernorm.weight", shape=(hidden,))
    yield Part(name="post_attention_layernorm.weight", shape=(hidden,))
    if spec.residuals:
        for before in ("self_attention", "mlp"):
            yield Part(name=f"{before}_res_norm.weight", shape=(hidden,))
            yield Part(name=f"{before}_res_proj.weight", shape=(1, hidden))
    yield from _ffn(spec, layer.ffn)


def prediction_parts(spec: ModelSpec) -> Iterator[Part]:
    """What a multi-token-prediction layer has beside a decoder layer's parts, by its names inside the layer."""
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield Part(name=f"{name}.weight", shape=(spec.hidden_size,))
    yield Part(name="eh_proj.weight", shape=(spec.hidden_size, 2 * spec.hidden_size))


def expert_prefix(spec: ModelSpec, expert: int) -> str:
    """Before the names of a routed expert's matrices, inside its layer."""
    return f"{spec.names.moe}experts.{expert}."


def expert_parts(spec: ModelSpec, ffn: MoEFFN) -> tuple[Part, Part, Part]:
    """Gate, up and down of any routed expert, by their names inside the expert."""
    hidden, width, names = experts_hidden(spec, ffn), ffn.intermediate_size, spec.names
    return (
        Part(name=f"{names.gate}.weight", shape=(width, hidden), packs="expert"),
        Part(name=f"{names.up}.weight", shape=(width, hidden), packs="expert"),
        Part(name=f"{names.down}.weight", shape=(hidden, width), packs="expert"),
    )


def stacks(spec: ModelSpec, ffn: MoEFFN) -> tuple[Part, Part]:
    """Fused experts: gate and up, then down, by their names inside the layer."""
    num_experts, hidden, width = ffn.router.num_experts, experts_hidden(spec, ffn), ffn.intermediate_size
    before = f"{spec.names.moe}experts."
    return (
        Part(name=f"{before}gate_up_proj", shape=(num_experts, 2 * width, hidden)),
        Part(name=f"{before}down_proj", shape=(num_experts, hidden, width)),
    )


def experts_hidden(spec: ModelSpec, ffn: MoEFFN) -> int:
    """What routed experts see."""
    return ffn.latent.hidden_size if ffn.latent else spec.hidden_size


def _mixer(mixer: Mixer, hidden: int) -> Iterator[Part]:
    parts = _delta(mixer, hidden) if isinstance(mixer, DeltaMixer) else _latent(mixer, hidden)
    for part in parts:
        yield replace(part, name=f"self_attn.{part.name}")


def _latent(mixer: LatentMixer, hidden: int) -> Iterator[Part]:
    a = mixer.shape
    q_dim, values = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.num_heads * a.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (a.row_dim, hidden),
        "kv_a_layernorm": (a.kv_lora_rank,),
        "kv_b_proj": (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank),
        "o_proj": (hidden, values),
    }
    if a.q_lora_rank is None:
        shapes["q_proj"] = (q_dim, hidden)
    else:
        shapes |= {"q_a_proj": (a.q_lora_rank, hidden), "q_a_layernorm": (a.q_lora_rank,)}
        shapes["q_b_proj"] = (q_dim, a.q_lora_rank)
    if mixer.has_output_gate:
        shapes["g_proj"] = (values, hidden)
    for name, shape in shapes.items():
        yield Part(name=f"{name}.weight", shape=shape, packs="body" if len(shape) == 2 else "never")
    if mixer.has_own_indexer:
        yield from _indexer(mixer, hidden)


def _indexer(mixer: LatentMixer, hidden: int) -> Iterator[Part]:
    indexer, rank = mixer.indexer, mixer.shape.q_lora_rank
    assert indexer is not None and rank is not None
    yield Part(name="indexer.wq_b.weight", shape=(indexer.num_heads * indexer.head_dim, rank), packs="body")
    yield Part(name="indexer.wk.weight", shape=(indexer.head_dim, hidden), packs="body")
    yield Part(name="indexer.k_norm.weight", shape=(indexer.head_dim,))
    yield Part(name="indexer.k_norm.bias", shape=(indexer.head_dim,))
    yield Part(name="indexer.weights_proj.weight", shape=(indexer.num_heads, hidden))


def _delta(mixer: DeltaMixer, hidden: int) -> Iterator[Part]:
    width, dim = mixer.width, mixer.head_dim
    shapes = {"q": (width, hidden), "k": (width, hidden), "v": (width, hidden), "g": (width, hidden),
              "o": (hidden, width), "b": (mixer.num_heads, hidden), "f_a": (dim, hidden),
              "f_b": (width, dim)}  # fmt: skip
    for name, shape in shapes.items():
        yield Part(name=f"{name}_proj.weight", shape=shape, packs="body")
    for name in "qkv":
        yield Part(name=f"{name}_conv1d.weight", shape=(width, 1, mixer.num_taps), dtypes=F32, is_float32=True)
    yield Part(name="A_log", shape=(mixer.padded_heads,), dtypes=F32, is_float32=True)
    yield Part(name="dt_bias", shape=(width,), dtypes=F32, is_float32=True)
    yield Part(name="o_norm.weight", shape=(dim,), dtypes=F32, is_float32=True)


def _ffn(spec: ModelSpec, ffn: FFN) -> Iterator[Part]:
    """A dense FFN, or what of a MoE every rank holds."""
    hidden, moe = spec.hidden_size, spec.names.moe
    if not isinstance(ffn, MoEFFN):
        yield from _swiglu("mlp.", hidden, ffn.intermediate_size)
        return
    num_experts = ffn.router.num_experts
    yield Part(name=f"{moe}gate.weight", shape=(num_experts, hidden), is_float32=True)
    if ffn.router.method == "noaux_tc":
        yield Part(name=f"{moe}gate.e_score_correction_bias", shape=(num_experts,), dtypes=F32, is_float32=True)
    if ffn.latent:
        inner = ffn.latent.hidden_size
        yield Part(name=f"{moe}routed_expert_down_proj.weight", shape=(inner, hidden), packs="body")
        yield Part(name=f"{moe}routed_expert_up_proj.weight", shape=(hidden, inner), packs="body")
        if ffn.latent.has_norm:
            yield Part(name=f"{moe}routed_expert_norm.weight", shape=(inner,))
    if ffn.shared_intermediate_size:
        yield from _swiglu(f"{moe}shared_experts.", hidden, ffn.shared_intermediate_size)


def _swiglu(before: str, hidden: int, width: int) -> Iterator[Part]:
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    for name, shape in shapes.items():
        yield Part(name=f"{before}{name}.weight", shape=shape, packs="body")
