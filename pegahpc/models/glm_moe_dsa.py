"""GLM-5.2: DeepSeek-V3's layers, with an indexer that chooses which tokens a row sees, in every layer or shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegahpc.models.fields import Fields
from pegahpc.models.latent_moe import ffn_kinds, model_spec, noaux_router, num_layers, rotary_mixer
from pegahpc.models.mixers import Indexer, LatentMixer
from pegahpc.models.spec import FFN, LayerSpec, ModelSpec, Prediction
from pegahpc.moe.shape import RouterShape

MODEL_TYPES = ("glm_moe_dsa",)
INDEXER_NORM_EPS = 1e-6  # of the LayerNorm on the indexer's keys (official class)
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention", "full_attention")  # spellings of one thing
INERT = ("num_mtp_layers", "num_local_experts", "head_dim")  # head_dim: the nope dims or the rope's, by who wrote it


def probe(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json of this line.

    Raises:
        UnsupportedModel: a field of another structure, missing, of a wrong type, or unknown.
    """
    fields = Fields(config)
    fields.pin("rope_interleave", True)
    fields.pin("indexer_rope_interleave", True)
    fields.inert(*INERT)
    mixer = rotary_mixer(fields)
    if mixer.shape.q_lora_rank is None:
        raise fields.refusal("q_lora_rank is missing; the indexer's queries are made from the query latent")
    mixer = replace(mixer, indexer=_indexer(fields, mixer))
    count = num_layers(fields)
    ffns = _ffns(fields, noaux_router(fields), count)
    _check_layer_types(fields, count)
    layers = tuple(
        LayerSpec(mixer=replace(mixer, is_indexer_shared=is_shared), ffn=ffn)
        for is_shared, ffn in zip(_is_shared(fields, count), ffns, strict=True)
    )
    return model_spec(fields, line="glm_moe_dsa", layers=layers, prediction=_prediction(fields, mixer, ffns))


def _indexer(fields: Fields, mixer: LatentMixer) -> Indexer:
    indexer = Indexer(
        num_heads=fields.take("index_n_heads", int),
        head_dim=fields.take("index_head_dim", int),
        rope_dim=mixer.shape.qk_rope_head_dim,
        topk=fields.take("index_topk", int),
        norm_eps=INDEXER_NORM_EPS,
    )
    if indexer.head_dim < indexer.rope_dim:
        raise fields.refusal(f"index_head_dim is {indexer.head_dim}, below qk_rope_head_dim {indexer.rope_dim}")
    if min(indexer.num_heads, indexer.topk) < 1:
        raise fields.refusal("index_n_heads and index_topk must be at least 1")
    return indexer


def _is_shared(fields: Fields, count: int) -> list[bool]:
    """For each layer, whether it takes the choice of the last one before it that has an indexer.

    Three spellings: a list, a pattern (`FSSS`), or a frequency and an offset.
    """
    frequency = max(fields.take("index_topk_freq", int, 1), 1)
    offset = fields.take("index_skip_topk_offset", int, 2)
    shared = [max(layer - offset + 1, 0) % frequency != 0 for layer in range(count)]
    pattern = fields.optional("index_topk_pattern", str)
    if pattern is not None:
        if set(pattern) - {"F", "S"}:
            raise fields.refusal(f"index_topk_pattern is {pattern!r}; this line serves letters F and S")
        shared = [letter == "S" for letter in pattern]
    kinds = fields.items("indexer_types", str)
    if kinds is not None:
        if set(kinds) - {"full", "shared"}:
            raise fields.refusal(f"indexer_types has {sorted(set(kinds))}; this line serves 'full' and 'shared'")
        shared = [kind == "shared" for kind in kinds]
    if len(shared) != count:
        raise fields.refusal(f"indexer_types names {len(shared)} layers, num_hidden_layers is {count}")
    if shared[:1] == [True]:
        raise fields.refusal("indexer_types: the first layer is 'shared', and no layer before it has an indexer")
    return shared


def _ffns(fields: Fields, router: RouterShape, count: int) -> tuple[FFN, ...]:
    dense, moe = ffn_kinds(fields, router)
    kinds = fields.items("mlp_layer_types", str)
    num_dense = fields.take("first_k_dense_replace", int, 3)
    if kinds is None:
        return tuple(dense if layer < num_dense else moe for layer in range(count))
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise fields.refusal(f"mlp_layer_types names {len(kinds)} layers as {sorted(set(kinds))};"
                             f" this line has {count}, 'dense' or 'sparse'")  # fmt: skip
    return tuple(dense if kind == "dense" else moe for kind in kinds)


def _check_layer_types(fields: Fields, count: int) -> None:
    kinds = fields.items("layer_types", str)
    if kinds is not None and (len(kinds) != count or set(kinds) - set(LAYER_TYPES)):
        raise fields.refusal(f"layer_types names {len(kinds)} layers as {sorted(set(kinds))};"
                             f" this line has {count} of {', '.join(LAYER_TYPES)}")  # fmt: skip


def _prediction(fields: Fields, mixer: LatentMixer, ffns: tuple[FFN, ...]) -> Prediction | None:
    count = fields.take("num_nextn_predict_layers", int, 0)
    shares = fields.take("index_share_for_mtp_iteration", bool, False)
    if not count:
        return None
    layer = LayerSpec(mixer=mixer, ffn=ffns[-1])
    return Prediction(num_layers=count, layer=layer, chains_normed=True, shares_selection=shares)
