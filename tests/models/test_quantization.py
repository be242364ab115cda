"""quantization_config in its forms: three formats are read, all others refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from oracles import ASSETS

from pegahpc.kernels.weight_format import INT4_GROUP, MXFP4, fp8_block
from pegahpc.models.fields import Fields, UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.quantization import read_quantization

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                       "weight_block_size": [128, 128]}  # fmt: skip
INT4: dict[str, Any] = read_config(ASSETS / "configs" / "kimi_k2")["quantization_config"]
MX: dict[str, Any] = read_config(ASSETS / "configs" / "k3")["text_config"]["quantization_config"]


def read(config: Any) -> Any:
    return read_quantization(Fields({"quantization_config": config}))


def weights(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    changed["config_groups"]["group_0"]["weights"] |= changes
    return changed


def test_each_published_form_names_its_format() -> None:
    assert read(None) is None and read_quantization(Fields({})) is None
    assert (read(FP8).format, read(FP8).covers_body) == (fp8_block(128, 128), True)
    assert (read(INT4).format, read(INT4).covers_body) == (INT4_GROUP, False)
    assert (read(MX).format, read(MX).covers_body) == (MXFP4, False)
    assert read(FP8 | {"weight_block_size": [64, 32]}).format.block == (64, 32)


def test_what_changes_nothing_about_reading_is_accepted() -> None:
    assert read(FP8 | {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}) == read(FP8)
    more = {"ignore": ["lm_head"], "global_compression_ratio": 2.0, "sparsity_config": {}, "kv_cache_scheme": None}
    assert read(weights(INT4, observer="minmax", actorder=None) | more) == read(INT4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config is 'fp8', not a mapping"),
        ({}, "quant_method is missing"),
        ({"quant_method": "awq"}, "quant_method is 'awq'; pegahpc reads 'fp8' and 'compressed-tensors'"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (FP8 | {"weight_block_size": None}, "weight_block_size is None"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is (128,)"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size is (0, 128)"),
        (FP8 | {"surprise": 1}, "fields that this line does not know: surprise=1"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'; pegahpc reads 'pack-quantized'"),
        (INT4 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}"),
        (INT4 | {"config_groups": None}, "config_groups has no group_0 with weights"),
        (INT4 | {"config_groups": INT4["config_groups"] | {"group_1": {}}}, "does not know: group_1={}"),
        (weights(INT4, num_bits=8), "num_bits is 8; pegahpc reads 4 only"),
        (weights(INT4, num_bits=None), "num_bits is missing"),
        (weights(INT4, group_size=128), "group_size is 128; pegahpc reads 32 only"),
        (weights(INT4, symmetric=False), "symmetric is False"),
        (weights(INT4, type="float"), "type is 'float'; this line serves 'int' only"),
        (weights(MX, type="int"), "type is 'int'; this line serves 'float' only"),
        (weights(INT4, actorder="group"), "actorder is 'group'"),
        (weights(INT4, zero_point=True), "does not know: zero_point=True"),
    ],
)
def test_another_form_is_refused_by_its_field(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        read(config)
    assert str(error.value).startswith("config.json: quantization_config") and message in str(error.value)


def test_widths_that_groups_do_not_divide_are_refused() -> None:
    kimi = read_config(ASSETS / "configs" / "kimi_k2")
    with pytest.raises(UnsupportedModel, match="moe_intermediate_size: int4_group: 2040 inputs are no multiple of its"):
        probe(kimi | {"moe_intermediate_size": 2040})
    assert probe(read_config(ASSETS / "configs" / "deepseek_v3") | {"moe_intermediate_size": 2040}).num_experts == 256


def test_a_wrappers_format_may_stand_beside_or_inside_its_text_model() -> None:
    text = read_config(ASSETS / "configs" / "kimi_k2")
    bare = {name: value for name, value in text.items() if name != "quantization_config"}
    inside = probe({"model_type": "kimi_k25", "text_config": text})
    assert probe({"model_type": "kimi_k25", "text_config": bare, "quantization_config": INT4}) == inside
    assert inside.quantization is not None and inside.tensor_prefix == "language_model."
