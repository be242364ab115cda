"""Kimi K3's config.json: what is made of it, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import ASSETS

from pegahpc.kernels.weight_format import MXFP4
from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.mixers import DeltaMixer, LatentMixer
from pegahpc.models.served import refuse_unserved
from pegahpc.models.spec import AttentionResiduals, DenseFFN, MoEFFN, Situ

K3 = read_config(ASSETS / "configs" / "k3")
TEXT, LINEAR = K3["text_config"], K3["text_config"]["linear_attn_config"]


def with_text(**changes: Any) -> dict[str, Any]:
    return K3 | {"text_config": TEXT | changes}


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModel) as error:
        probe(config)
    return str(error.value)


def test_k3_as_published() -> None:
    spec = probe(K3)
    assert (spec.line, spec.num_layers, spec.num_experts, spec.hidden_size) == ("kimi_k3", 93, 896, 7168)
    latents = [layer for layer, part in enumerate(spec.layers) if isinstance(part.mixer, LatentMixer)]
    assert latents == [*range(3, 92, 4), 92] and len(latents) == 24
    assert (spec.rope, spec.latent.has_output_gate, spec.latent.indexer) == (None, True, None)
    assert spec.attention.softmax_scale == pytest.approx(0.07216878, rel=1e-6)  # 192^-0.5, nothing stretched
    delta = spec.layers[0].mixer
    assert isinstance(delta, DeltaMixer)
    assert (delta.width, delta.num_taps, delta.lower_bound, delta.padded_heads) == (12288, 4, -5.0, 128)
    assert spec.residuals == AttentionResiduals(block_size=12)
    assert AttentionResiduals(block_size=12).num_snapshots(93) == 8
    assert spec.ffns[0] == DenseFFN(intermediate_size=33792, situ=Situ(beta=4.0, linear_beta=25.0))
    moe = spec.ffns[1]
    assert isinstance(moe, MoEFFN) and moe.latent is not None
    assert (moe.latent.hidden_size, moe.latent.has_norm, moe.shared_intermediate_size) == (3584, True, 6144)
    assert (moe.router.num_topk, moe.router.norm_topk_prob, moe.router.scale) == (16, True, 1.0)
    assert spec.quantization is not None and spec.quantization.format == MXFP4 and not spec.quantization.covers_body


def test_a_state_is_a_float32_matrix_a_head_and_three_windows() -> None:
    delta = probe(K3).layers[0].mixer
    assert isinstance(delta, DeltaMixer)
    assert delta.state_bytes(4) == 96 * 128 * 128 * 4 + 3 * 3 * 12288 * 4
    assert delta.state_bytes(2) == 96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2


def test_the_format_may_stand_beside_or_inside_the_text_model() -> None:
    inside = {name: value for name, value in TEXT.items() if name != "quantization_config"}
    beside = K3 | {"text_config": inside, "quantization_config": TEXT["quantization_config"]}
    assert probe(beside) == probe(K3)
    assert probe(K3 | {"text_config": inside}).quantization is None


def test_fields_that_change_nothing_are_accepted() -> None:
    inert = {
        "rope_theta": 5.0,
        "head_dim": 74,
        "use_cache": False,
        "kda_mode": "fused_recurrent",
        "eos_token_id": [1, 2],
    }
    assert probe(with_text(**inert) | {"vision_config": {"depth": 3}, "ignore_index": -100}) == probe(K3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; this line serves True only"),
        ({"mla_use_output_gate": False}, "mla_use_output_gate is False"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; this line serves 'situ' only"),
        ({"kda_use_qk_l2norm_in_kernel": False}, "kda_use_qk_l2norm_in_kernel is False"),
        ({"attn_res_block_size": None}, "attn_res_block_size is missing"),
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0, below 1"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"linear_attn_config": None}, "linear_attn_config is missing"),
        ({"linear_attn_config": LINEAR | {"use_full_rank_gate": False}}, "use_full_rank_gate is False"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": 5.0}}, "gate_lower_bound below 0"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [1]}}, "do not name each of the layers 1 to 93 once"),
        ({"linear_attn_config": LINEAR | {"kda_layers": list(range(1, 94)), "full_attn_layers": []}}, "is empty"),
        ({"linear_attn_config": LINEAR | {"mode": "x"}}, "linear_attn_config: fields that this line does not know"),
        ({"routed_expert_hidden_size": 3600}, "routed_expert_hidden_size: mxfp4: 3600 inputs are no multiple of its"),
        ({"sliding_window": 5}, "text_config: fields that this line does not know: sliding_window=5"),
        ({"model_type": "kimi_k2"}, "kimi_k3 has no text_config of model_type 'kimi_linear'"),
    ],
)
def test_another_structure_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    assert message in refusal_of(with_text(**changes))


def test_a_line_whose_parts_are_not_built_is_refused_by_their_names() -> None:
    with pytest.raises(UnsupportedModel) as error:
        refuse_unserved(probe(K3))
    said = str(error.value)
    assert "kimi_k3 has parts that pegahpc does not serve: latent attention without positions, " in said
    assert "Kimi Delta Attention" in said and "attention residuals" in said and "indexer" not in said
    for name in ("deepseek_v3", "kimi_k2", "deepseek_v2_lite"):
        refuse_unserved(probe(read_config(ASSETS / "configs" / name)))
