"""From a checked checkpoint to one rank's decoder: every tensor is read once, a rank's own experts only."""

# Shape suffixes: H = hidden, V = vocabulary, E = local experts, I = expert width, N = heads, C = latent dims,
# P = a head's dims without position, V also = a head's value dims, R = rows of all groups

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pegahpc.checkpoint.files import read_headers
from pegahpc.checkpoint.intake import Intake, into
from pegahpc.checkpoint.manifest import check, is_fused
from pegahpc.checkpoint.names import expert_parts, expert_prefix, experts_hidden, layer_prefix
from pegahpc.checkpoint.reading import trim_heap
from pegahpc.kernels.packed_experts import PackedExperts
from pegahpc.kernels.selected import Kernels
from pegahpc.layers.dense_ffn import DenseFFN, DenseWeights
from pegahpc.mla.attention import LatentAttention, LatentWeights
from pegahpc.mla.shape import LatentShape
from pegahpc.models import spec as specs
from pegahpc.models.decoder import FFN, Decoder, Layer
from pegahpc.models.mixers import LatentMixer
from pegahpc.models.served import refuse_unserved
from pegahpc.models.spec import ModelSpec
from pegahpc.moe.dispatch import Dispatcher
from pegahpc.moe.layer import MoELayer, MoEWeights


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and in what type the weights are to stand."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    dispatcher: Dispatcher
    packed_experts: bool = True  # routed experts that the checkpoint packs stay as they are

    @property
    def experts(self) -> range:
        """This rank's own."""
        first = self.dispatcher.first_expert
        return range(first, first + self.dispatcher.num_local_experts)


def load_decoder(folder: Path, spec: ModelSpec, placement: Placement, progress: Callable[[float], None]) -> Decoder:
    """Check the checkpoint's headers, then read this rank's weights.

    Args:
        progress: called with the share of bytes read so far, 0 to 1.

    Raises:
        UnsupportedModel: a line whose parts are not all there.
        CheckpointError: faults in the headers, all together, or weights that are not finite.
    """
    refuse_unserved(spec)
    headers = read_headers(folder)
    check(spec, headers)
    format = spec.quantization.format if spec.quantization else None
    intake = Intake(headers.tensors, format, device=placement.device, dtype=placement.dtype)
    model = _Model(intake, spec, placement)
    intake.fill(progress)
    return model.decoder()


Experts = tuple[torch.Tensor, torch.Tensor] | PackedExperts
"""This rank's routed experts of one layer: gate and up, and down, or as the checkpoint packs them."""


class _Model:
    """All weights, allocated. A layer is made as soon as its own are read, and lets go what it does not keep."""

    def __init__(self, intake: Intake, spec: ModelSpec, placement: Placement) -> None:
        self._intake, self._spec, self._placement = intake, spec, placement
        prefix = spec.tensor_prefix
        self._embed_VH, self._head_HV = self._embed_and_head(f"{prefix}model.embed_tokens.weight")
        self._final_norm_H = intake.vector(f"{prefix}model.norm.weight")
        self._made: dict[int, Layer] = {}
        self._waiting: dict[int, Callable[[], Layer]] = {}
        for number in range(spec.num_layers):
            intake.begin(partial(self._make, number))
            self._waiting[number] = self._layer(number)

    def _make(self, number: int) -> None:
        self._made[number] = self._waiting.pop(number)()
        trim_heap()

    def decoder(self) -> Decoder:
        """Once everything is read."""
        return Decoder(
            embed_VH=self._embed_VH,
            layers=tuple(self._made[number] for number in range(self._spec.num_layers)),
            final_norm_H=self._final_norm_H,
            head_HV=self._head_HV,
            rms_norm_eps=self._spec.rms_norm_eps,
            kernels=self._placement.kernels,
        )

    def _embed_and_head(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """[vocab, hidden] and [hidden, vocab]; of a tied model both from one tensor."""
        if not self._spec.tie_word_embeddings:
            head = f"{self._spec.tensor_prefix}lm_head.weight"
            return self._intake.vector(name), self._intake.transposed(head)
        embed_VH = self._intake.new(self._spec.vocab_size, self._spec.hidden_size)
        head_HV = self._intake.new(self._spec.hidden_size, self._spec.vocab_size)

        def place(first_row: int, rows: torch.Tensor) -> None:
            into(embed_VH)(first_row, rows)
            into(head_HV.t())(first_row, rows)

        self._intake.read(name, place)
        return embed_VH, head_HV

    def _layer(self, number: int) -> Callable[[], Layer]:
        before, kernels = layer_prefix(self._spec, number), self._placement.kernels
        mixer = self._spec.layers[number].mixer
        assert isinstance(mixer, LatentMixer)
        weights = _latent_weights(self._intake, mixer.shape, before + "self_attn.")
        ffn = self._ffn(number)
        input_norm_H = self._intake.vector(before + "input_layernorm.weight")
        post_attention_norm_H = self._intake.vector(before + "post_attention_layernorm.weight")
        return lambda: Layer(
            attention=LatentAttention(mixer.shape, weights, kernels),
            ffn=ffn(),
            input_norm_H=input_norm_H,
            post_attention_norm_H=post_attention_norm_H,
        )

    def _ffn(self, number: int) -> Callable[[], FFN]:
        ffn, placement = self._spec.ffns[number], self._placement
        before = layer_prefix(self._spec, number)
        if isinstance(ffn, specs.DenseFFN):
            gate_up, down = _swiglu(self._intake, before + "mlp.")
            return lambda: DenseFFN(DenseWeights(gate_up_HI=gate_up, down_IH=down), placement.kernels)
        experts = self._experts(number, ffn)
        weights = _moe_weights(self._intake, ffn, experts, before + self._spec.names.moe)
        return lambda: MoELayer(ffn.router, weights, placement.kernels, placement.dispatcher)

    def _experts(self, number: int, ffn: specs.MoEFFN) -> Experts:
        """This rank's routed experts, from wherever the layer has them."""
        intake, own = self._intake, self._placement.experts
        before = layer_prefix(self._spec, number)
        names = [[before + expert_prefix(self._spec, expert) + part.name for part in expert_parts(self._spec, ffn)]
                 for expert in own]  # fmt: skip
        is_stack = is_fused(self._spec, number, intake.tensors)
        is_packed = not is_stack and all(intake.packed_format(name) for matrices in names for name in matrices)
        if is_packed and self._placement.packed_experts:
            return _packed_experts(intake, names)
        hidden, width = experts_hidden(self._spec, ffn), ffn.intermediate_size
        gate_up_EHI, down_EIH = intake.new(len(own), hidden, 2 * width), intake.new(len(own), width, hidden)
        if is_stack:
            stacks = before + self._spec.names.moe + "experts."
            intake.read(stacks + "gate_up_proj", into(gate_up_EHI.transpose(1, 2)), rows=own)
            intake.read(stacks + "down_proj", into(down_EIH.transpose(1, 2)), rows=own)
        for expert, (gate, up, down) in enumerate([] if is_stack else names):
            intake.read_joined((gate, up), gate_up_EHI[expert])
            intake.read_joined((down,), down_EIH[expert])
        return gate_up_EHI, down_EIH


def _packed_experts(intake: Intake, names: list[list[str]]) -> PackedExperts:
    gate, up = intake.new_packed(len(names), *names[0][:2])
    (down,) = intake.new_packed(len(names), names[0][2])
    for expert, own in enumerate(names):
        for name, stack in zip(own, (gate, up, down), strict=True):
            intake.read_packed(name, stack[expert])
    return PackedExperts(gate=gate, up=up, down=down)


def _latent_weights(intake: Intake, shape: LatentShape, before: str) -> LatentWeights:
    has_lora = shape.q_lora_rank is not None
    q_in = "q_a_proj.weight" if has_lora else "q_proj.weight"
    w_uk_NPC = intake.new(shape.num_heads, shape.qk_nope_head_dim, shape.kv_lora_rank)
    w_uv_NCV = intake.new(shape.num_heads, shape.kv_lora_rank, shape.v_head_dim)
    height = shape.qk_nope_head_dim + shape.v_head_dim

    def place(first_row: int, rows: torch.Tensor) -> None:
        """Whole heads: the keys' half and the values' half of each."""
        heads = rows.view(-1, height, shape.kv_lora_rank)
        keys, values = torch.split(heads, [shape.qk_nope_head_dim, shape.v_head_dim], dim=1)
        into(w_uk_NPC)(first_row // height, keys)
        into(w_uv_NCV)(first_row // height, values.transpose(1, 2))

    intake.read(before + "kv_b_proj.weight", place, granularity=height)
    return LatentWeights(
        qkv_a_HX=intake.transposed(before + q_in, before + "kv_a_proj_with_mqa.weight"),
        q_a_norm=intake.vector(before + "q_a_layernorm.weight") if has_lora else None,
        q_b=intake.transposed(before + "q_b_proj.weight") if has_lora else None,
        kv_a_norm_C=intake.vector(before + "kv_a_layernorm.weight"),
        w_uk_NPC=w_uk_NPC,
        w_uv_NCV=w_uv_NCV,
        o_proj=intake.transposed(before + "o_proj.weight"),
    )


def _swiglu(intake: Intake, before: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = intake.transposed(f"{before}gate_proj.weight", f"{before}up_proj.weight")
    return gate_up, intake.transposed(f"{before}down_proj.weight")


def _moe_weights(intake: Intake, ffn: specs.MoEFFN, experts: Experts, before: str) -> MoEWeights:
    gate_up, down = (None, None) if isinstance(experts, PackedExperts) else experts
    has_bias, has_shared = ffn.router.method == "noaux_tc", ffn.shared_intermediate_size > 0
    shared = _swiglu(intake, before + "shared_experts.") if has_shared else (None, None)
    return MoEWeights(
        gate_HE=intake.transposed(before + "gate.weight", dtype=torch.float32),
        bias_E=intake.vector(before + "gate.e_score_correction_bias", torch.float32) if has_bias else None,
        gate_up_EHI=gate_up,
        down_EIH=down,
        shared_gate_up_HI=shared[0],
        shared_down_IH=shared[1],
        packed=experts if isinstance(experts, PackedExperts) else None,
    )
