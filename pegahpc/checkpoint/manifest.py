"""What a checkpoint must hold, by name, shape and type, and which rank keeps what. No torch.

Routed experts come per expert (`mlp.experts.7.gate_proj.weight`) or fused (`mlp.experts.gate_up_proj`), matrices
plain or in the packed format that config.json names; all are read. A manifest is held against the headers before a
byte of weights is read, and all faults are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from pegahpc.checkpoint.files import CheckpointError, Headers, TensorInfo, faults
from pegahpc.checkpoint.names import (
    Part,
    expert_parts,
    expert_prefix,
    layer_parts,
    layer_prefix,
    model_parts,
    prediction_parts,
    stacks,
)
from pegahpc.checkpoint.siblings import sibling
from pegahpc.kernels.weight_format import WeightFormat
from pegahpc.models.spec import LayerSpec, ModelSpec, MoEFFN

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "U8": 1}
SKIPPED = re.compile(r"rotary_emb\.inv_freq$|\.weight_shape$")  # buffers of old; shapes that the packed codes have, too


class TensorSpec(NamedTuple):
    """One tensor that the line reads. (A tuple: a checkpoint may have half a million.)"""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # safetensors' names that are read; the first is the usual one, or the one that is there
    expert: int | None = None  # a routed expert's own tensor; None: every rank reads it
    is_stack: bool = False  # first dim counts routed experts: a rank reads its own slice
    is_float32: bool = False  # an engine holds it in float32
    num_unpacked: int = -1  # of packed codes: elements of their matrix; of scales 0; -1: it is plain

    @property
    def num_bytes(self) -> int:
        """In the checkpoint."""
        return prod(self.shape) * ITEM_BYTES[self.dtypes[0]]

    def held_bytes(self, item: int, *, packed_experts: bool) -> int:
        """In an engine whose type has so many bytes, and which keeps packed experts as they are or unpacks them."""
        if self.num_unpacked < 0:
            return prod(self.shape) * (4 if self.is_float32 else item)
        is_kept = packed_experts and self.expert is not None
        return self.num_bytes if is_kept else self.num_unpacked * item


def is_fused(spec: ModelSpec, layer: int, stored: Mapping[str, object]) -> bool:
    """Whether this layer's routed experts are stored as stacks."""
    return f"{layer_prefix(spec, layer)}{spec.names.moe}experts.gate_up_proj" in stored


def packed_format(
    spec: ModelSpec, part: Part, name: str, stored: Mapping[str, TensorInfo] | None
) -> WeightFormat | None:
    """The format that a matrix is packed in; None: it is plain.

    Args:
        name: the part's full name.
        stored: the checkpoint's tensors, whose names and types decide; None: config.json alone does.
    """
    quantization = spec.quantization
    if quantization is None or part.packs == "never":
        return None
    format = quantization.format
    expected = format if part.packs == "expert" or quantization.covers_body else None
    if stored is None:
        return expected
    base = name.removesuffix(".weight")
    codes = stored.get(base + format.codes)
    if base + format.scales in stored or (codes is not None and codes.dtype == format.codes_dtype):
        return format
    return None if name in stored else expected


def manifest(
    spec: ModelSpec,
    stored: Mapping[str, TensorInfo] | None = None,
    *,
    experts: range | None = None,
    has_prediction: bool = False,
) -> list[TensorSpec]:
    """Every tensor that the model reads.

    Args:
        stored: the checkpoint's tensors, which decide fused or per expert, packed or plain; None: as is usual.
        experts: of routed experts only these (of stacks the whole stack); None: all.
        has_prediction: multi-token-prediction layers as well.
    """
    tensors = [tensor for part in model_parts(spec) for tensor in _tensors(spec, part, "", stored)]
    for number, layer in enumerate(spec.layers):
        tensors += _layer(spec, number, layer, stored)
        tensors += _experts(spec, number, layer, stored, experts)
    if spec.prediction and has_prediction:
        for number in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
            tensors += _layer(spec, number, spec.prediction.layer, stored)
            tensors += _experts(spec, number, spec.prediction.layer, stored, experts)
            tensors += [TensorSpec(layer_prefix(spec, number) + part.name, part.shape, part.dtypes)
                        for part in prediction_parts(spec)]  # fmt: skip
    return tensors


def check(spec: ModelSpec, headers: Headers) -> list[TensorSpec]:
    """The manifest, held against the checkpoint's headers; each tensor's type is the one that is there.

    Raises:
        CheckpointError: a checkpoint of another line, files that are damaged, and tensors that are missing, of another
            shape or type, or unknown to this line: all of them, in this order.
    """
    stored = headers.tensors
    _check_counts(spec, len(stored) + len(headers.lost))
    expected = manifest(spec, stored)
    here = [tensor for tensor in expected if tensor.name not in headers.lost]
    known = {tensor.name for tensor in expected}
    unknown = [f"{name}: this line ({spec.line}) has no such tensor" for name in stored
               if name not in known and not _is_skipped(spec, name)]  # fmt: skip
    missing, shapes, dtypes = _missing(here, stored), list(_shapes(here, stored)), list(_dtypes(here, stored))
    other = sibling(spec, stored) if missing or unknown else None
    groups = [[other] if other else [], headers.damaged, missing, shapes, dtypes, unknown]
    if any(groups):
        raise faults(*groups)
    return [tensor._replace(dtypes=(stored[tensor.name].dtype,)) for tensor in expected]


def _layer(
    spec: ModelSpec, number: int, layer: LayerSpec, stored: Mapping[str, TensorInfo] | None
) -> Iterator[TensorSpec]:
    for part in layer_parts(spec, layer):
        yield from _tensors(spec, part, layer_prefix(spec, number), stored)


def _experts(
    spec: ModelSpec, number: int, layer: LayerSpec, stored: Mapping[str, TensorInfo] | None, experts: range | None
) -> Iterator[TensorSpec]:
    if not isinstance(layer.ffn, MoEFFN):
        return
    before, num_experts = layer_prefix(spec, number), layer.ffn.router.num_experts
    if stored is not None and is_fused(spec, number, stored):
        for part in stacks(spec, layer.ffn):
            yield TensorSpec(before + part.name, part.shape, part.dtypes, is_stack=True)
        return
    parts = expert_parts(spec, layer.ffn)
    for expert in range(num_experts) if experts is None else experts:
        for part in parts:
            yield from _tensors(spec, part, before + expert_prefix(spec, expert), stored, expert)


def _tensors(
    spec: ModelSpec, part: Part, before: str, stored: Mapping[str, TensorInfo] | None, expert: int | None = None
) -> Iterator[TensorSpec]:
    name = before + part.name
    format = packed_format(spec, part, name, stored)
    if format is None:
        yield TensorSpec(name, part.shape, part.dtypes, expert, is_float32=part.is_float32)
        return
    base, (codes, scales) = name.removesuffix(".weight"), format.stored(*part.shape)
    yield TensorSpec(base + codes.suffix, codes.shape, codes.dtypes, expert, num_unpacked=prod(part.shape))
    yield TensorSpec(base + scales.suffix, scales.shape, scales.dtypes, expert, num_unpacked=0)


def _check_counts(spec: ModelSpec, num_tensors: int) -> None:
    """Refuse a config.json that asks for far more than there is, before a list of it all is made."""
    num_moe = sum(isinstance(ffn, MoEFFN) for ffn in spec.ffns)
    fewest = 6 * spec.num_layers + 2 * num_moe
    most = fewest + 20 * spec.num_layers + 6 * num_moe * spec.num_experts
    if fewest > num_tensors or (most > 10 * num_tensors + 100_000):
        raise CheckpointError(
            f"config.json says {spec.num_layers} layers and {spec.num_experts} experts;"
            f" the checkpoint has only {num_tensors} tensors"
        )


def _missing(wanted: list[TensorSpec], stored: Mapping[str, TensorInfo]) -> list[str]:
    return [f"{tensor.name}: is missing from the checkpoint (expected shape {list(tensor.shape)})"
            for tensor in wanted if tensor.name not in stored]  # fmt: skip


def _shapes(wanted: list[TensorSpec], stored: Mapping[str, TensorInfo]) -> Iterator[str]:
    for tensor in wanted:
        info = stored.get(tensor.name)
        if info is not None and info.shape != tensor.shape:
            found, said = list(info.shape), list(tensor.shape)
            yield f"{tensor.name}: has shape {found}, config.json says {said} ({info.file.name})"


def _dtypes(wanted: list[TensorSpec], stored: Mapping[str, TensorInfo]) -> Iterator[str]:
    for tensor in wanted:
        info = stored.get(tensor.name)
        if info is not None and info.dtype not in tensor.dtypes:
            read = sorted(tensor.dtypes, key=lambda dtype: -ITEM_BYTES[dtype])
            said = f"not one of {', '.join(read)}" if len(read) > 1 else f"not {read[0]}"
            yield f"{tensor.name}: has type {info.dtype}, {said} ({info.file.name})"


def _is_skipped(spec: ModelSpec, name: str) -> bool:
    """Buffers of old, tied heads that are stored all the same, multi-token-prediction layers, other towers."""
    if SKIPPED.search(name) or name.startswith(spec.other_towers):
        return True
    if spec.tie_word_embeddings and name == f"{spec.tensor_prefix}lm_head.weight":
        return True
    extra = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    return any(name.startswith(layer_prefix(spec, layer)) for layer in extra)
