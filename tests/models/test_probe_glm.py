"""GLM-5.2's config.json: what is made of it, in every spelling, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from oracles import ASSETS, SHAPE
from transformers import GlmMoeDsaConfig

from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.mixers import LatentMixer
from pegahpc.models.spec import DenseFFN, ModelSpec

GLM = read_config(ASSETS / "configs" / "glm52")
PATTERN = ("index_topk_freq", "index_skip_topk_offset", "indexer_types")


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModel) as error:
        probe(config)
    return str(error.value)


def latent_mixers(spec: ModelSpec) -> list[LatentMixer]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, LatentMixer)]


def own_indexers(spec: ModelSpec) -> list[int]:
    return [layer for layer, mixer in enumerate(latent_mixers(spec)) if mixer.has_own_indexer]


def test_glm_5_2_as_published() -> None:
    spec = probe(GLM)
    assert (spec.line, spec.num_layers, spec.num_experts, spec.max_position) == ("glm_moe_dsa", 78, 256, 1048576)
    assert spec.attention.softmax_scale == 0.0625  # 256^-0.5
    assert (spec.attention.row_dim, spec.rms_norm_eps, spec.vocab_size) == (576, 1e-5, 154880)
    assert [isinstance(ffn, DenseFFN) for ffn in spec.ffns] == [True] * 3 + [False] * 75
    indexer = spec.latent.indexer
    assert indexer is not None and (indexer.num_heads, indexer.head_dim, indexer.rope_dim) == (32, 128, 64)
    assert (indexer.topk, indexer.norm_eps) == (2048, 1e-6)
    assert spec.rope is not None and (spec.rope.theta, spec.rope.yarn) == (8e6, None)
    assert spec.quantization is not None and spec.quantization.covers_body
    assert spec.quantization.format.block == (128, 128)


def test_layers_without_an_indexer_share_the_last_ones_choice() -> None:
    spec = probe(GLM)
    assert own_indexers(spec) == [0, 1, 2, *range(6, 75, 4)] and len(own_indexers(spec)) == 21
    assert all(mixer.indexer == spec.latent.indexer for mixer in latent_mixers(spec))


def test_the_prediction_layer_has_an_indexer_and_chains_the_normed_state() -> None:
    prediction = probe(GLM).prediction
    assert prediction is not None and isinstance(prediction.layer.mixer, LatentMixer)
    assert prediction.layer.mixer.has_own_indexer and not isinstance(prediction.layer.ffn, DenseFFN)
    assert (prediction.num_layers, prediction.chains_normed, prediction.shares_selection) == (1, True, True)
    assert probe(GLM | {"num_nextn_predict_layers": 0}).prediction is None


def test_every_spelling_of_the_shared_layers_is_one() -> None:
    bare = {name: value for name, value in GLM.items() if name not in PATTERN}
    letters = "".join({"full": "F", "shared": "S"}[kind] for kind in GLM["indexer_types"])
    for spelling in (
        {"indexer_types": GLM["indexer_types"]},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": letters},
    ):
        assert probe(bare | spelling) == probe(GLM)
    assert own_indexers(probe(bare)) == list(range(78)), "without any of them each layer has its own"


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention", "full_attention"])
def test_every_spelling_of_the_layer_types_is_one(kind: str) -> None:
    assert probe(GLM | {"layer_types": [kind] * 78}) == probe(GLM)


def test_what_transformers_writes_is_read() -> None:
    """The official configuration class derives the schedules by itself and writes them out."""
    changes: dict[str, Any] = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16, "q_lora_rank": 32,
               "num_hidden_layers": 6, "n_group": 1, "topk_group": 1}  # fmt: skip
    schedules: list[dict[str, Any]] = [{}, {"index_topk_freq": 2}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}]
    for schedule in schedules:
        config = GlmMoeDsaConfig(**(SHAPE | changes | schedule))
        written = config.to_diff_dict()
        spec = probe(written | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
        assert config.indexer_types is not None
        assert [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"] == own_indexers(spec)
        assert spec == probe(SHAPE | changes | schedule | {"model_type": "glm_moe_dsa", "rope_theta": 1e4,
                                                           "routed_scaling_factor": 2.5})  # fmt: skip


def test_fields_that_change_nothing_are_accepted() -> None:
    inert = {"head_dim": 64, "attention_dropout": 0.5, "num_key_value_heads": 1, "ep_size": 8, "dtype": "float32",
             "initializer_range": 1.0, "pad_token_id": 3, "use_cache": False, "architectures": ["X"]}  # fmt: skip
    assert probe(GLM | inert) == probe(GLM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False; this line serves True only"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"q_lora_rank": None}, "q_lora_rank is missing; the indexer's queries"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"index_topk": 0}, "index_n_heads and index_topk must be at least 1"),
        ({"index_head_dim": 32}, "index_head_dim is 32, below qk_rope_head_dim 64"),
        ({"indexer_types": ["full"] * 77}, "indexer_types names 77 layers, num_hidden_layers is 78"),
        ({"indexer_types": ["shared"] * 78}, "the first layer is 'shared', and no layer before it has an indexer"),
        ({"indexer_types": ["full"] * 77 + ["half"]}, "indexer_types has ['full', 'half']"),
        ({"indexer_types": "full"}, "indexer_types is 'full', not a list of type str"),
        ({"indexer_types": None, "index_topk_pattern": "FSX"}, "index_topk_pattern is 'FSX'"),
        ({"layer_types": ["indexed_attention"] * 77 + ["sliding_attention"]}, "layer_types names 78 layers as"),
        ({"layer_types": ["indexed_attention"]}, "layer_types names 1 layers"),
        ({"mlp_layer_types": ["dense"] * 77 + ["moe"]}, "mlp_layer_types names 78 layers as ['dense', 'moe']"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"qk_head_dim": 192}, "qk_head_dim is 192; this line serves 256 only"),
        ({"index_kpool": 16}, "fields that this line does not know: index_kpool=16"),
        ({"num_hidden_layers": 0, "indexer_types": []}, "num_hidden_layers is 0, below 1"),
    ],
)
def test_another_structure_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    assert message in refusal_of(GLM | changes)
