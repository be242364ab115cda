"""`quantization_config` of a config.json: which packed format a checkpoint has. Other formats are refused by name."""

from __future__ import annotations

from pegahpc.kernels.weight_format import INT4_GROUP, MXFP4, WeightFormat, fp8_block
from pegahpc.models.fields import Fields, UnsupportedModel
from pegahpc.models.spec import Quantization

# Lists of modules that are not packed change nothing here: the checkpoint's own names say which are.
INERT_FP8 = ("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
INERT_GROUP = ("targets", "input_activations", "output_activations", "format")
INERT_WEIGHTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
INERT_PACKED = ("ignore", "global_compression_ratio", "transform_config", "version")
FORMATS = {"pack-quantized": (INT4_GROUP, "int"), "mxfp4-pack-quantized": (MXFP4, "float")}


def read_quantization(fields: Fields) -> Quantization | None:
    """The packed format that config.json speaks of, or None.

    Activations are not quantised here, whatever the checkpoint was made for: weights are read exactly.

    Raises:
        UnsupportedModel: a method or format that is not read.
    """
    config = fields.nested("quantization_config")
    if config is None:
        return None
    method = config.take("quant_method", str)
    if method not in ("fp8", "compressed-tensors"):
        raise config.refusal(f"quant_method is {method!r}; pegahpc reads 'fp8' and 'compressed-tensors'")
    read = _read_fp8 if method == "fp8" else _read_compressed_tensors
    quantization = Quantization(format=read(config), covers_body=method == "fp8")
    config.finish()
    return quantization


def _read_fp8(config: Fields) -> WeightFormat:
    config.pin("fmt", "e4m3")
    config.pin("activation_scheme", "dynamic")  # static ones would lie in the checkpoint
    config.inert(*INERT_FP8)
    block = config.items("weight_block_size", int)
    if block is None or len(block) != 2 or min(block) < 1:
        raise config.refusal(f"weight_block_size is {block}; pegahpc reads FP8 in blocks of [rows, columns]")
    return fp8_block(*block)


def _read_compressed_tensors(config: Fields) -> WeightFormat:
    name = config.take("format", str)
    if name not in FORMATS:
        raise config.refusal(f"format is {name!r}; pegahpc reads {', '.join(map(repr, FORMATS))}")
    format, kind = FORMATS[name]
    config.pin("quantization_status", "compressed")
    config.pin("kv_cache_scheme", None)
    config.pin("sparsity_config", {})
    config.inert(*INERT_PACKED)
    groups = config.nested("config_groups")
    group = groups.nested("group_0") if groups else None
    weights = group.nested("weights") if group else None
    if groups is None or group is None or weights is None:
        raise config.refusal("config_groups has no group_0 with weights")
    group.inert(*INERT_GROUP)
    for field, only in (("num_bits", 4), ("group_size", format.block[1])):  # absent they would mean something else
        if (found := weights.take(field, int)) != only:
            raise weights.refusal(f"{field} is {found}; pegahpc reads {only} only")
    wanted = {"strategy": "group", "symmetric": True, "type": kind, "dynamic": False, "actorder": None}
    for field, value in (wanted | {"block_structure": None}).items():
        weights.pin(field, value)
    weights.inert(*INERT_WEIGHTS)
    for part in (weights, group, groups):
        part.finish()
    return format


def check_divides(quantization: Quantization | None, **widths: int) -> None:
    """Refuse inputs of packed matrices that are no whole number of groups.

    Raises:
        UnsupportedModel: names the width.
    """
    if quantization is None:
        return
    for name, width in widths.items():
        try:
            quantization.format.stored(1, width)
        except ValueError as error:
            raise UnsupportedModel(f"config.json: {name}: {error}") from None
