"""What a line's checkpoint must hold, by name and shape, and which rank keeps what. No torch.

Routed experts come per expert (`mlp.experts.7.gate_proj.weight`) or fused (`mlp.experts.gate_up_proj`); both are
read. A manifest is checked against the headers before a byte of weights is read, all faults together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pegahpc.checkpoint.files import TensorInfo, faults
from pegahpc.models.spec import DenseFFN, ModelSpec, MoEFFN

DTYPES = ("F32", "BF16", "F16")
SKIPPED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor that the line reads."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None  # a routed expert's own tensor; None: every rank reads it
    is_stack: bool = False  # first dim counts routed experts: a rank reads its own slice


def layer_prefix(spec: ModelSpec, layer: int) -> str:
    """Before the names of a layer's tensors."""
    return f"{spec.tensor_prefix}model.layers.{layer}."


def is_fused(spec: ModelSpec, layer: int, names: Mapping[str, object]) -> bool:
    """Whether this layer's routed experts are stored as stacks."""
    return f"{layer_prefix(spec, layer)}mlp.experts.gate_up_proj" in names


def manifest(spec: ModelSpec, names: Mapping[str, object]) -> list[TensorSpec]:
    """Every tensor that the model reads; `names` are the checkpoint's, which decide fused or per expert."""
    prefix, hidden, vocab = spec.tensor_prefix, spec.hidden_size, spec.vocab_size
    tensors = [
        TensorSpec(name=f"{prefix}model.embed_tokens.weight", shape=(vocab, hidden)),
        TensorSpec(name=f"{prefix}model.norm.weight", shape=(hidden,)),
    ]
    if not spec.tie_word_embeddings:
        tensors.append(TensorSpec(name=f"{prefix}lm_head.weight", shape=(vocab, hidden)))
    for layer, ffn in enumerate(spec.ffns):
        before = layer_prefix(spec, layer)
        parts = [*_attention(spec), *_norms(spec)]
        parts += _dense(ffn, hidden) if isinstance(ffn, DenseFFN) else _moe(ffn, hidden, is_fused(spec, layer, names))
        tensors += [
            TensorSpec(name=before + part.name, shape=part.shape, expert=part.expert, is_stack=part.is_stack)
            for part in parts
        ]
    return tensors


def check(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> list[TensorSpec]:
    """The manifest, held against the checkpoint's headers.

    Raises:
        CheckpointError: tensors that are missing, of another shape or type, or that this line does not know.
    """
    _check_counts(spec, len(tensors))
    expected = manifest(spec, tensors)
    found = [fault for wanted in expected for fault in _faults_of(wanted, tensors.get(wanted.name))]
    known = {wanted.name for wanted in expected}
    found += [f"{name}: this line ({spec.line}) has no such tensor" for name in tensors
              if name not in known and not _is_skipped(spec, name)]  # fmt: skip
    if found:
        raise faults(found)
    return expected


def _check_counts(spec: ModelSpec, num_tensors: int) -> None:
    """Refuse a config.json that asks for far more than there is, before a list of it all is made."""
    num_moe = sum(isinstance(ffn, MoEFFN) for ffn in spec.ffns)
    fewest = 6 * spec.num_layers + 2 * num_moe
    most = fewest + 20 * spec.num_layers + 3 * num_moe * spec.num_experts
    if fewest > num_tensors or (most > 10 * num_tensors + 100_000):
        raise faults([f"config.json says {spec.num_layers} layers and {spec.num_experts} experts;"
                      f" the checkpoint has only {num_tensors} tensors"])  # fmt: skip


def _faults_of(wanted: TensorSpec, info: TensorInfo | None) -> Iterator[str]:
    if info is None:
        yield f"{wanted.name}: is missing from the checkpoint (expected shape {list(wanted.shape)})"
        return
    if info.shape != wanted.shape:
        yield f"{wanted.name}: has shape {list(info.shape)}, config.json says {list(wanted.shape)} ({info.file.name})"
    if info.dtype not in DTYPES:
        yield f"{wanted.name}: has type {info.dtype}, not one of {', '.join(DTYPES)} ({info.file.name})"


def _is_skipped(spec: ModelSpec, name: str) -> bool:
    """Rotary buffers, tied heads stored all the same, multi-token-prediction layers, a wrapper's other towers."""
    if SKIPPED.search(name) or (spec.tensor_prefix and not name.startswith(spec.tensor_prefix)):
        return True
    if spec.tie_word_embeddings and name == f"{spec.tensor_prefix}lm_head.weight":
        return True
    extra = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    return any(name.startswith(layer_prefix(spec, layer)) for layer in extra)


def _attention(spec: ModelSpec) -> list[TensorSpec]:
    a, hidden = spec.attention, spec.hidden_size
    q_dim = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (a.row_dim, hidden),
        "kv_a_layernorm.weight": (a.kv_lora_rank,),
        "kv_b_proj.weight": (a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank),
        "o_proj.weight": (hidden, a.num_heads * a.v_head_dim),
    }
    if a.q_lora_rank is None:
        shapes["q_proj.weight"] = (q_dim, hidden)
    else:
        shapes["q_a_proj.weight"] = (a.q_lora_rank, hidden)
        shapes["q_a_layernorm.weight"] = (a.q_lora_rank,)
        shapes["q_b_proj.weight"] = (q_dim, a.q_lora_rank)
    return [TensorSpec(name=f"self_attn.{name}", shape=shape) for name, shape in shapes.items()]


def _norms(spec: ModelSpec) -> list[TensorSpec]:
    names = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return [TensorSpec(name=name, shape=(spec.hidden_size,)) for name in names]


def _swiglu(before: str, hidden: int, width: int, expert: int | None = None) -> list[TensorSpec]:
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return [TensorSpec(name=f"{before}{n}.weight", shape=shape, expert=expert) for n, shape in shapes.items()]


def _dense(ffn: DenseFFN, hidden: int) -> list[TensorSpec]:
    return _swiglu("mlp.", hidden, ffn.intermediate_size)


def _moe(ffn: MoEFFN, hidden: int, fused: bool) -> list[TensorSpec]:
    num_experts, width = ffn.router.num_experts, ffn.intermediate_size
    tensors = [TensorSpec(name="mlp.gate.weight", shape=(num_experts, hidden))]
    if ffn.router.method == "noaux_tc":
        tensors.append(TensorSpec(name="mlp.gate.e_score_correction_bias", shape=(num_experts,)))
    if ffn.shared_intermediate_size:
        tensors += _swiglu("mlp.shared_experts.", hidden, ffn.shared_intermediate_size)
    if fused:
        shapes = {"gate_up_proj": (num_experts, 2 * width, hidden), "down_proj": (num_experts, hidden, width)}
        return tensors + [TensorSpec(name=f"mlp.experts.{n}", shape=s, is_stack=True) for n, s in shapes.items()]
    for expert in range(num_experts):
        tensors += _swiglu(f"mlp.experts.{expert}.", hidden, width, expert)
    return tensors
