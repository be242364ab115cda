"""Which config.json a line claims, what it makes of it, and what it refuses by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from oracles import TINY_MOE

from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.rope import Yarn
from pegahpc.models.spec import DenseFFN, MoEFFN

# As published on the Hub, without quantization_config.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 262144, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "pad_token_id": 163839, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
LINES = {"V2": V2_LITE, "K2": KIMI_K2, "V3": KIMI_K2 | {"model_type": "deepseek_v3"}}


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModel) as error:
        probe(config)
    return str(error.value)


def test_deepseek_v2_lite_as_published() -> None:
    spec = probe(V2_LITE)
    # 192^-0.5 = 0.0721688; 0.1 * 0.707 * ln 40 + 1 = 1.2608038; its square 1.5896262
    assert spec.attention.softmax_scale == pytest.approx(0.11472138, rel=1e-6)
    assert (spec.attention.q_lora_rank, spec.attention.kv_lora_rank, spec.attention.row_dim) == (None, 512, 576)
    assert (spec.line, spec.num_layers, spec.num_experts, spec.vocab_size) == ("deepseek_v2", 27, 64, 102400)
    assert spec.ffns[0] == DenseFFN(intermediate_size=10944)
    moe = spec.ffns[1]
    assert isinstance(moe, MoEFFN) and all(ffn == moe for ffn in spec.ffns[1:])
    assert (moe.intermediate_size, moe.shared_intermediate_size) == (1408, 2816)
    router = moe.router
    assert (router.scoring, router.method, router.num_topk) == ("softmax", "greedy", 6)
    assert (router.norm_topk_prob, router.scale) == (False, 1.0)
    assert spec.rope is not None and spec.rope.yarn is not None and spec.rope.yarn.cis_scale == 1.0
    assert (spec.tie_word_embeddings, spec.num_mtp_layers, spec.tensor_prefix) == (False, 0, "")


def test_kimi_k2_as_published() -> None:
    spec = probe(KIMI_K2)
    # 192^-0.5 = 0.0721688; 0.1 * ln 64 + 1 = 1.4158883; its square 2.0047397
    assert spec.attention.softmax_scale == pytest.approx(0.14467962, rel=1e-6)
    assert (spec.attention.q_lora_rank, spec.attention.num_heads, spec.attention.v_head_dim) == (1536, 64, 128)
    assert (spec.line, spec.num_layers, spec.num_experts, spec.max_position) == ("deepseek_v3", 61, 384, 262144)
    moe = spec.ffns[60]
    assert isinstance(moe, MoEFFN) and moe.shared_intermediate_size == 2048
    router = moe.router
    assert (router.scoring, router.method, router.num_topk) == ("sigmoid", "noaux_tc", 8)
    assert (router.norm_topk_prob, router.scale, router.num_groups) == (True, 2.827, 1)
    assert spec.rope is not None and (spec.rope.theta, spec.rms_norm_eps) == (50000.0, 1e-5)
    assert spec.attention.latent_norm_eps == 1e-6  # the official class builds these two norms with its default


def test_without_a_stretch_the_scale_is_that_of_the_head() -> None:
    config = KIMI_K2 | {"rope_scaling": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4}
    assert probe(config).attention.softmax_scale == 0.25  # (12 + 4)^-0.5


def test_deepseek_v3_in_groups_with_a_prediction_layer() -> None:
    changes = {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1}
    spec = probe(LINES["V3"] | changes)
    assert (spec.num_layers, spec.num_mtp_layers) == (61, 1)
    moe = spec.ffns[-1]
    assert isinstance(moe, MoEFFN) and (moe.router.num_groups, moe.router.num_topk_groups) == (8, 4)


def test_v2s_groups_count_for_the_limited_method_only() -> None:
    changes = {"n_group": 8, "topk_group": 3}
    greedy = probe(V2_LITE | changes).ffns[1]
    limited = probe(V2_LITE | changes | {"topk_method": "group_limited_greedy"}).ffns[1]
    assert isinstance(greedy, MoEFFN) and isinstance(limited, MoEFFN)
    assert (greedy.router.num_groups, greedy.router.num_topk_groups) == (1, 1)
    assert (limited.router.num_groups, limited.router.num_topk_groups) == (8, 3)


def test_the_shipped_model_is_claimed() -> None:
    spec = probe(read_config(TINY_MOE))
    assert (spec.line, spec.num_layers, spec.num_experts, spec.num_mtp_layers) == ("deepseek_v3", 6, 16, 1)
    assert spec.tie_word_embeddings


def test_a_wrapper_serves_its_text_model_under_its_prefix() -> None:
    wrapped = probe({"model_type": "kimi_k25", "text_config": KIMI_K2, "vision_config": {}, "anything": 1})
    assert wrapped.tensor_prefix == "language_model."
    assert wrapped.attention == probe(KIMI_K2).attention
    for text in (None, "kimi", 7):
        assert "kimi_k25 has no text_config" in refusal_of({"model_type": "kimi_k25", "text_config": text})
    quantised = KIMI_K2 | {"quantization_config": {"format": "pack-quantized"}}
    assert "quantization_config" in refusal_of({"model_type": "kimi_k25", "text_config": quantised})


@pytest.mark.parametrize("model_type", ["llama", None, "", 7, ["deepseek_v2"], {}])
def test_a_model_that_no_line_claims_is_told_what_is_served(model_type: Any) -> None:
    known = "deepseek_v2, deepseek_v3, glm_moe_dsa, kimi_k2, kimi_k25, kimi_k3"
    message = f"model_type is {model_type!r}; pegahpc serves {known}"
    assert message in refusal_of(KIMI_K2 | {"model_type": model_type})


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config: quant_method is 'gptq'; pegahpc reads"),
        ("sliding_window", 4096, "fields that this line does not know: sliding_window=4096"),
        ("attention_bias", True, "attention_bias is True; this line serves False only"),
        ("mlp_bias", True, "mlp_bias is True; this line serves False only"),
        ("moe_layer_freq", 2, "moe_layer_freq is 2; this line serves 1 only"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; this line serves 'silu' only"),
        ("scoring_func", "relu", "scoring_func is 'relu'"),
        ("topk_method", "other", "topk_method is 'other'"),
        ("head_dim", 192, "head_dim is 192; this line serves 64 only"),
        ("qk_head_dim", 64, "qk_head_dim is 64; this line serves 192 only"),
        ("hidden_size", "7168", "hidden_size is '7168', not of type int"),
        ("hidden_size", 7168.0, "hidden_size is 7168.0, not of type int"),
        ("hidden_size", True, "hidden_size is True, not of type int"),
        ("hidden_size", None, "hidden_size is missing"),
        ("hidden_size", -1, "hidden_size is -1, below 0"),
        ("tie_word_embeddings", 1, "tie_word_embeddings is 1, not of type bool"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6', not of type float"),
        ("n_routed_experts", 0, "num_experts is 0, below 1"),
        ("num_experts_per_tok", 0, "num_topk is 0, below 1"),
        ("num_experts_per_tok", 400, "hold fewer than 400 experts"),
        ("qk_rope_head_dim", 63, "qk_rope_head_dim is 63"),
        ("qk_rope_head_dim", 0, "qk_rope_head_dim is 0"),
        ("rope_theta", 0, "rope_theta is 0.0, not above 1"),
        ("rope_scaling", "yarn", "rope_scaling is 'yarn', not a mapping"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope type is 'linear'"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling: factor is missing"),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "truncate": True}, "does not know: truncate=True"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "rope_parameters and rope_scaling are both"),
    ],
)
def test_another_structure_is_refused_by_its_field(line: str, field: str, value: Any, message: str) -> None:
    assert message in refusal_of(LINES[line] | {field: value})


def test_each_line_keeps_its_own_router() -> None:
    assert "scoring_func is 'sigmoid'; this line serves 'softmax' only" in refusal_of(V2_LITE | {"scoring_func": "sigmoid"})  # fmt: skip  # noqa: E501
    assert "norm_topk_prob is True" in refusal_of(V2_LITE | {"norm_topk_prob": True})
    assert "topk_method is 'noaux_tc'" in refusal_of(V2_LITE | {"topk_method": "noaux_tc"})
    assert "scoring_func is 'softmax'" in refusal_of(KIMI_K2 | {"scoring_func": "softmax"})
    assert "topk_method is 'greedy'" in refusal_of(KIMI_K2 | {"topk_method": "greedy"})
    assert "rope_interleave is False" in refusal_of(KIMI_K2 | {"rope_interleave": False})


@pytest.mark.parametrize("line", LINES)
def test_several_unknown_fields_are_named_together(line: str) -> None:
    message = refusal_of(LINES[line] | {"zeta": 1, "alpha": "x"})
    assert message == "config.json: fields that this line does not know: alpha='x', zeta=1"


@pytest.mark.parametrize("line", LINES)
def test_fields_that_change_nothing_are_accepted(line: str) -> None:
    inert = {"_name_or_path": "x", "architectures": ["Other"], "attention_dropout": 0.5, "use_cache": False,
             "id2label": {"0": "a"}, "label2id": {"a": 0}, "output_router_logits": True, "dtype": "float32",
             "router_aux_loss_coef": 0.1, "pad_token_id": None, "transformers_version": "9"}  # fmt: skip
    assert probe(LINES[line] | inert) == probe(LINES[line])


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_both_spellings_of_the_rope_are_one(line: str, kind: str) -> None:
    published = LINES[line]
    scaling = {name: value for name, value in published["rope_scaling"].items() if name != "type"}
    without = {name: value for name, value in published.items() if name not in ("rope_scaling", "rope_theta")}
    merged = {"rope_parameters": scaling | {kind: "yarn", "rope_theta": published["rope_theta"]}}
    assert probe(without | merged) == probe(published)
    rope = probe(without | merged).rope
    assert rope is not None and isinstance(rope.yarn, Yarn)


@pytest.mark.parametrize("line", LINES)
def test_a_plain_rope_may_be_spelled_in_three_ways(line: str) -> None:
    base = {name: value for name, value in LINES[line].items() if not name.startswith("rope_")}
    plain = probe(base | {"rope_theta": 20000.0})
    assert plain == probe(base | {"rope_theta": 20000, "rope_scaling": None})
    assert plain == probe(base | {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}})
    assert plain.rope is not None and plain.rope.theta == 20000.0 and plain.rope.yarn is None


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "is this the folder of a checkpoint?"), ("{", "is no JSON"), ("[1]", "is no JSON object")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=f"{re.escape(str(tmp_path / 'config.json'))}.*{re.escape(message)}"):
        read_config(tmp_path)


def test_bytes_that_are_no_text_are_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UnsupportedModel, match="is no JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    assert read_config(tmp_path) == V2_LITE
