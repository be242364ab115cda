"""From a checked checkpoint to one rank's decoder: every tensor is read once, a rank's own experts only."""

# Shape suffixes: H = hidden, E = local experts, I = expert width

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from pegahpc.checkpoint.files import CheckpointError, TensorInfo, read_headers
from pegahpc.checkpoint.manifest import check, is_fused
from pegahpc.checkpoint.names import layer_prefix
from pegahpc.kernels.selected import Kernels
from pegahpc.layers.dense_ffn import DenseFFN, DenseWeights
from pegahpc.mla.attention import LatentAttention, LatentWeights
from pegahpc.models import spec as specs
from pegahpc.models.decoder import FFN, Decoder, Layer
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


def load_decoder(folder: Path, spec: ModelSpec, placement: Placement, progress: Callable[[float], None]) -> Decoder:
    """Check the checkpoint's headers, then read this rank's weights.

    Args:
        progress: called with the share of elements read so far, 0 to 1.

    Raises:
        CheckpointError: faults in the headers, all together, or a weight that is not finite.
    """
    headers = read_headers(folder)
    wanted, tensors = check(spec, headers), headers.tensors
    num_local, first = placement.dispatcher.num_local_experts, placement.dispatcher.first_expert
    own = range(first, first + num_local)
    kept = [tensor for tensor in wanted if tensor.expert is None or tensor.expert in own]
    total = sum(prod(tensor.shape) * num_local // tensor.shape[0] if tensor.is_stack else prod(tensor.shape)
                for tensor in kept)  # fmt: skip
    with TensorReader(tensors, placement, lambda done: progress(done / total)) as reader:
        return _decoder(reader, spec, placement)


class TensorReader:
    """Reads tensors by name, each at most once, from files that stay mapped until the load is over."""

    def __init__(self, tensors: dict[str, TensorInfo], placement: Placement, progress: Callable[[int], None]) -> None:
        self.tensors = tensors
        self._placement = placement
        self._progress = progress
        self._done = 0
        self._stack = ExitStack()
        files = {info.file for info in tensors.values()}
        self._open = {file: self._stack.enter_context(safe_open(file, framework="pt")) for file in files}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def get(self, name: str, *, experts: range | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor (of a stack, these experts' slice), checked to be finite, in the placement's or this dtype."""
        handle = self._open[self.tensors[name].file]
        tensor: torch.Tensor = (
            handle.get_tensor(name) if experts is None else handle.get_slice(name)[experts.start : experts.stop]
        )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name}: holds values that are not finite ({self.tensors[name].file.name})")
        self._done += tensor.numel()
        self._progress(self._done)
        return tensor.to(device=self._placement.device, dtype=dtype or self._placement.dtype)

    def get_transposed(self, *names: str) -> torch.Tensor:
        """[out, in] matrices joined along out, stored [in, out] as the row products want them."""
        return torch.cat([self.get(name) for name in names]).t().contiguous()


def _decoder(reader: TensorReader, spec: ModelSpec, placement: Placement) -> Decoder:
    prefix = spec.tensor_prefix
    embed_VH = reader.get(f"{prefix}model.embed_tokens.weight")
    layers = tuple(_layer(reader, spec, placement, layer) for layer in range(spec.num_layers))
    tied = spec.tie_word_embeddings
    return Decoder(
        embed_VH=embed_VH,
        layers=layers,
        final_norm_H=reader.get(f"{prefix}model.norm.weight"),
        head_HV=embed_VH.t().contiguous() if tied else reader.get_transposed(f"{prefix}lm_head.weight"),
        rms_norm_eps=spec.rms_norm_eps,
        kernels=placement.kernels,
    )


def _layer(reader: TensorReader, spec: ModelSpec, placement: Placement, layer: int) -> Layer:
    before = layer_prefix(spec, layer)
    weights = _latent_weights(reader, spec, before + "self_attn.")
    return Layer(
        attention=LatentAttention(spec.attention, weights, placement.kernels),
        ffn=_ffn(reader, spec, placement, layer),
        input_norm_H=reader.get(before + "input_layernorm.weight"),
        post_attention_norm_H=reader.get(before + "post_attention_layernorm.weight"),
    )


def _latent_weights(reader: TensorReader, spec: ModelSpec, before: str) -> LatentWeights:
    shape = spec.attention
    kv_b_NXC = torch.unflatten(reader.get(before + "kv_b_proj.weight"), 0, (shape.num_heads, -1))
    w_uk_NPC, w_vu_NVC = torch.split(kv_b_NXC, [shape.qk_nope_head_dim, shape.v_head_dim], dim=1)
    has_lora = shape.q_lora_rank is not None
    q_in = "q_a_proj.weight" if has_lora else "q_proj.weight"
    return LatentWeights(
        qkv_a_HX=reader.get_transposed(before + q_in, before + "kv_a_proj_with_mqa.weight"),
        q_a_norm=reader.get(before + "q_a_layernorm.weight") if has_lora else None,
        q_b=reader.get_transposed(before + "q_b_proj.weight") if has_lora else None,
        kv_a_norm_C=reader.get(before + "kv_a_layernorm.weight"),
        w_uk_NPC=w_uk_NPC.contiguous(),
        w_uv_NCV=w_vu_NVC.transpose(1, 2).contiguous(),
        o_proj=reader.get_transposed(before + "o_proj.weight"),
    )


def _ffn(reader: TensorReader, spec: ModelSpec, placement: Placement, layer: int) -> FFN:
    ffn, before = spec.ffns[layer], layer_prefix(spec, layer) + "mlp."
    if isinstance(ffn, specs.DenseFFN):
        gate_up, down = _swiglu(reader, before)
        return DenseFFN(DenseWeights(gate_up_HI=gate_up, down_IH=down), placement.kernels)
    return MoELayer(ffn.router, _moe_weights(reader, spec, placement, layer), placement.kernels, placement.dispatcher)


def _swiglu(reader: TensorReader, before: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = reader.get_transposed(f"{before}gate_proj.weight", f"{before}up_proj.weight")
    return gate_up, reader.get_transposed(f"{before}down_proj.weight")


def _moe_weights(reader: TensorReader, spec: ModelSpec, placement: Placement, layer: int) -> MoEWeights:
    ffn, before = spec.ffns[layer], layer_prefix(spec, layer) + "mlp."
    assert isinstance(ffn, specs.MoEFFN)
    first = placement.dispatcher.first_expert
    own = range(first, first + placement.dispatcher.num_local_experts)
    if is_fused(spec, layer, reader.tensors):
        gate_up = reader.get(before + "experts.gate_up_proj", experts=own).transpose(1, 2).contiguous()
        down = reader.get(before + "experts.down_proj", experts=own).transpose(1, 2).contiguous()
    else:
        gate_up, down = (
            torch.stack(parts)
            for parts in zip(*(_swiglu(reader, f"{before}experts.{expert}.") for expert in own), strict=True)
        )
    has_bias, has_shared = ffn.router.method == "noaux_tc", ffn.shared_intermediate_size > 0
    shared = _swiglu(reader, before + "shared_experts.") if has_shared else (None, None)
    bias = reader.get(before + "gate.e_score_correction_bias", dtype=torch.float32) if has_bias else None
    return MoEWeights(
        gate_HE=reader.get(before + "gate.weight", dtype=torch.float32).t().contiguous(),
        bias_E=bias,
        gate_up_EHI=gate_up,
        down_EIH=down,
        shared_gate_up_HI=shared[0],
        shared_down_IH=shared[1],
    )
