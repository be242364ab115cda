"""What each line's checkpoint must hold, from config.json alone, against counts and names worked out elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import ASSETS, SHAPE
from tensor_files import spec_of
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from pegahpc.checkpoint.files import CheckpointError, Headers, TensorInfo, read_headers
from pegahpc.checkpoint.manifest import TensorSpec, check, manifest
from pegahpc.models.lines import probe, read_config
from pegahpc.models.spec import ModelSpec

GIB = 2**30
HERE = Path("model.safetensors")


def published(name: str) -> ModelSpec:
    return spec_of(ASSETS / "configs" / name)


# Of the published checkpoints: tensors and GiB that one rank reads (the original system's counts of its loads).
COUNTS = [
    ("glm52", 4, False, 30_660, 188.006),
    ("glm52", 8, False, 16_260, 103.61),
    ("glm52", 4, True, 31_077, 190.6),
    ("k3", 16, False, 2_460 + 56 * 92 * 6, 189.9),
]


@pytest.mark.parametrize(("name", "ep_size", "has_prediction", "num_tensors", "gib"), COUNTS)
def test_a_rank_reads_what_the_published_checkpoints_have(
    name: str, ep_size: int, has_prediction: bool, num_tensors: int, gib: float
) -> None:
    spec = published(name)
    last = range(spec.num_experts)[-spec.num_experts // ep_size :]
    kept = manifest(spec, experts=last, has_prediction=has_prediction)
    assert len(kept) == num_tensors
    assert sum(tensor.num_bytes for tensor in kept) / GIB == pytest.approx(gib, abs=0.01)


def test_kimi_k2_packs_its_experts_alone() -> None:
    tensors = {tensor.name: tensor for tensor in manifest(published("kimi_k2"), experts=range(383, 384))}
    before = "model.layers.60.mlp.experts.383."
    packed, scale = tensors[before + "gate_proj.weight_packed"], tensors[before + "gate_proj.weight_scale"]
    assert (packed.shape, packed.dtypes) == ((2048, 896), ("I32",))
    assert (scale.shape, scale.dtypes[0], scale.expert) == ((2048, 224), "BF16", 383)
    assert tensors[before + "down_proj.weight_packed"].shape == (7168, 256)
    assert tensors["model.layers.60.mlp.shared_experts.up_proj.weight"].shape == (2048, 7168)
    assert not any("packed" in name for name, tensor in tensors.items() if tensor.expert is None)


def test_glm_packs_its_projections_and_no_router_norm_or_head() -> None:
    tensors = {tensor.name: tensor for tensor in manifest(published("glm52"), experts=range(1), has_prediction=True)}
    before = "model.layers.6."
    scale = tensors[before + "self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    assert (scale.shape, scale.dtypes) == ((5, 48), ("F32",))  # 576 rows are four blocks and a half
    assert tensors[before + "self_attn.indexer.wk.weight"].dtypes == ("F8_E4M3",)
    plain = ("self_attn.indexer.weights_proj.weight", "self_attn.indexer.k_norm.bias", "mlp.gate.weight")
    assert all(tensors[before + name].dtypes[0] == "BF16" for name in plain)
    assert tensors["model.layers.78.eh_proj.weight"].shape == (6144, 12288)
    assert "model.layers.78.self_attn.indexer.wq_b.weight" in tensors
    assert "model.layers.7.self_attn.indexer.wk.weight" not in tensors, "a layer that shares has none"
    assert not any(name.startswith(("lm_head", "model.embed")) and "scale" in name for name in tensors)


# The parts of Kimi K3's checkpoint, by its published names; experts and layer numbers taken out.
K3_DELTA = {"self_attn.q_proj.weight": (12288, 7168), "self_attn.g_proj.weight": (12288, 7168),
            "self_attn.o_proj.weight": (7168, 12288), "self_attn.b_proj.weight": (96, 7168),
            "self_attn.f_a_proj.weight": (128, 7168), "self_attn.f_b_proj.weight": (12288, 128),
            "self_attn.k_conv1d.weight": (12288, 1, 4), "self_attn.A_log": (128,), "self_attn.dt_bias": (12288,),
            "self_attn.o_norm.weight": (128,), "self_attention_res_proj.weight": (1, 7168),
            "mlp_res_norm.weight": (7168,)}  # fmt: skip
K3_LATENT = {"self_attn.q_a_proj.weight": (1536, 7168), "self_attn.q_b_proj.weight": (18432, 1536),
             "self_attn.kv_b_proj.weight": (24576, 512), "self_attn.g_proj.weight": (12288, 7168),
             "self_attn.o_proj.weight": (7168, 12288)}  # fmt: skip
K3_MOE = {"block_sparse_moe.gate.e_score_correction_bias": (896,),
          "block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
          "block_sparse_moe.routed_expert_norm.weight": (3584,),
          "block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
          "block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
          "block_sparse_moe.experts.895.w1.weight_packed": (3072, 1792),
          "block_sparse_moe.experts.895.w2.weight_packed": (3584, 1536),
          "block_sparse_moe.experts.895.w3.weight_scale": (3072, 112)}  # fmt: skip


def test_k3_has_the_published_names_and_shapes() -> None:
    shapes = {tensor.name: tensor.shape for tensor in manifest(published("k3"), experts=range(895, 896))}
    for layer, parts in ((4, K3_DELTA | K3_MOE), (92, K3_LATENT | K3_MOE), (0, {"mlp.up_proj.weight": (33792, 7168)})):
        for name, shape in parts.items():
            assert shapes[f"language_model.model.layers.{layer}.{name}"] == shape
    assert shapes["language_model.model.output_attn_res_proj.weight"] == (1, 7168)
    assert shapes["language_model.lm_head.weight"] == (163840, 7168)
    assert not any("self_attn.A_log" in name for name in shapes if ".layers.3." in name)


@pytest.mark.parametrize("indexer_types", [["full"] * 4, ["full", "shared", "full", "shared"]])
def test_a_glm_checkpoint_that_transformers_wrote_is_all_known(tmp_path: Path, indexer_types: list[str]) -> None:
    changes: dict[str, Any] = {"q_lora_rank": 32, "num_hidden_layers": 4, "index_topk": 8, "index_n_heads": 2,
               "index_head_dim": 16, "indexer_types": indexer_types, "n_group": 1, "topk_group": 1,
               "num_nextn_predict_layers": 0, "first_k_dense_replace": 1}  # fmt: skip
    GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**(SHAPE | changes))).save_pretrained(tmp_path, max_shard_size="100KB")
    headers = read_headers(tmp_path)
    wanted = check(spec_of(tmp_path), headers)
    assert {tensor.name for tensor in wanted} == headers.tensors.keys()


def headers_of(tensors: list[TensorSpec]) -> Headers:
    """A checkpoint with just these, as its headers would say."""
    return Headers({t.name: TensorInfo(HERE, t.shape, t.dtypes[0], 0) for t in tensors}, [], frozenset())


LINES = ("deepseek_v2_lite", "deepseek_v3", "glm52", "k3")
SMALL = {"n_routed_experts": 8, "num_experts": 8, "num_hidden_layers": 3}


def small(name: str) -> dict[str, Any]:
    """A published config.json with a few layers and experts, in groups of one."""
    config: dict[str, Any] = json.loads(json.dumps(read_config(ASSETS / "configs" / name)))
    text = config.get("text_config", config)
    text |= {key: value for key, value in SMALL.items() if key in text} | {"topk_group": 1, "first_k_dense_replace": 1}
    text |= {key: 1 for key in ("n_group", "num_expert_group") if key in text}
    text |= {key: 3 for key in ("num_experts_per_tok", "num_experts_per_token") if key in text}
    text |= {"indexer_types": ["full"] * 3, "mlp_layer_types": ["dense"] * 3} if name == "glm52" else {}
    if name == "k3":
        text["linear_attn_config"] |= {"kda_layers": [1, 2], "full_attn_layers": [3]}
    return config


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("other", LINES)
def test_a_siblings_checkpoint_is_said_to_be_one_before_all_else(name: str, other: str) -> None:
    spec, theirs = probe(small(name)), probe(small(other))
    headers = headers_of(manifest(theirs))
    if name == other:
        assert len(check(spec, headers)) == len(headers.tensors)
        return
    with pytest.raises(CheckpointError) as error:
        check(spec, headers)
    first, *others = str(error.value).splitlines()
    assert first.startswith(f"config.json is one of {spec.line}, the tensors are those of {theirs.line} (there is ")
    assert others[-1].startswith("... and ")


def test_faults_come_in_groups_and_each_group_is_seen() -> None:
    spec = probe(small("deepseek_v3"))
    tensors = headers_of(manifest(spec)).tensors
    names = [name for name in tensors if "experts" in name and name.endswith("weight")]
    for name in names[:12]:
        del tensors[name]
    for name in names[12:24]:
        tensors[name] = TensorInfo(HERE, (1,), "F8_E4M3", 0)
    tensors["model.norm.weight"] = TensorInfo(HERE, (7168,), "I64", 0)
    tensors["surprise"] = TensorInfo(HERE, (1,), "F32", 0)
    lost = frozenset({names[30]})
    del tensors[names[30]]
    with pytest.raises(CheckpointError) as error:
        check(spec, Headers(tensors, ["b.safetensors: cannot be read"], lost))
    lines = str(error.value).splitlines()
    kinds = ("cannot be read", "is missing", "has shape", "has type", "has no such tensor", "... and 17 more")
    found = [next(kind for kind in kinds if kind in line or (kind == kinds[4] and "no such" in line)) for line in lines]
    assert Counter(found) == Counter({kinds[0]: 1, kinds[1]: 4, kinds[2]: 3, kinds[3]: 1, kinds[4]: 1, kinds[5]: 1})
    assert found == sorted(found, key=kinds.index)


def test_packed_matrices_without_a_quantization_config_are_said_to_be_packed() -> None:
    config = small("deepseek_v3")
    headers = headers_of(manifest(probe(config)))
    with pytest.raises(
        CheckpointError, match=r"^config.json has no quantization_config, but matrices are packed \(there"
    ):
        check(probe(config | {"quantization_config": None}), headers)


def test_a_text_model_under_anothers_prefix_is_said_to_be_there() -> None:
    config = small("deepseek_v3")
    headers = headers_of(manifest(probe({"model_type": "kimi_k25", "text_config": config})))
    with pytest.raises(CheckpointError, match=r"^config.json wants names that start with 'model.', the tensors' start"):
        check(probe(config), headers)


def test_plain_matrices_are_read_where_packed_ones_are_expected_and_the_other_way_round() -> None:
    """What is packed says the checkpoint: lists of modules in config.json need not be right."""
    config = small("deepseek_v3")
    spec, plain = probe(config), probe(config | {"quantization_config": None})
    assert len(check(spec, headers_of(manifest(plain)))) == len(manifest(plain))
    everywhere = manifest(spec)
    assert {tensor.dtypes for tensor in check(spec, headers_of(everywhere))} == {("BF16",), ("F32",), ("F8_E4M3",)}


@pytest.mark.parametrize(("gone", "left"), [(".weight_scale_inv", "weight"), (".weight", "weight_scale_inv")])
def test_codes_without_scales_and_scales_without_codes_are_faults(gone: str, left: str) -> None:
    spec = probe(small("deepseek_v3"))
    headers = headers_of(manifest(spec))
    name = f"model.layers.1.self_attn.o_proj{gone}"
    del headers.tensors[name]
    with pytest.raises(CheckpointError) as error:
        check(spec, headers)
    assert str(error.value).startswith(f"{name}: is missing from the checkpoint (expected shape ")
    assert len(str(error.value).splitlines()) == 1, left


def test_a_vision_tower_is_left_alone_by_its_name_and_nothing_else_is() -> None:
    spec = probe(small("k3"))
    headers = headers_of(manifest(spec))
    headers.tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = TensorInfo(HERE, (3, 3), "F64", 0)
    headers.tensors["mm_projector.proj.0.weight"] = TensorInfo(HERE, (3, 3), "BF16", 0)
    check(spec, headers)
    headers.tensors["audio_tower.weight"] = TensorInfo(HERE, (3, 3), "BF16", 0)
    with pytest.raises(CheckpointError, match=r"^audio_tower.weight: this line \(kimi_k3\) has no such tensor$"):
        check(spec, headers)


def test_float32_of_the_official_class_is_read_in_the_place_of_bfloat16(tmp_path: Path) -> None:
    spec = probe(small("deepseek_v2_lite"))
    wide = [TensorSpec(name=t.name, shape=t.shape, dtypes=("F32",), expert=t.expert) for t in manifest(spec)]
    read = check(spec, headers_of(wide))
    assert {tensor.dtypes for tensor in read} == {("F32",)} and torch.float32.itemsize == 4
    assert sum(t.num_bytes for t in read) == 2 * sum(t.num_bytes for t in manifest(spec))
