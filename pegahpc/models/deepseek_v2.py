"""DeepSeek-V2 and V2-Lite: latent attention, softmax router, greedy or group-limited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegahpc.models.fields import Fields
from pegahpc.models.latent_moe import leading_dense, model_spec, rotary_mixer
from pegahpc.models.spec import LayerSpec, ModelSpec
from pegahpc.moe.shape import RouterShape

MODEL_TYPES = ("deepseek_v2",)


def probe(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json of this line.

    Raises:
        UnsupportedModel: a field of another structure, missing, of a wrong type, or unknown.
    """
    fields = Fields(config)
    mixer = rotary_mixer(fields)
    fields.pin("head_dim", mixer.shape.qk_rope_head_dim)
    ffns = leading_dense(fields, _router(fields))
    return model_spec(fields, line="deepseek_v2", layers=tuple(LayerSpec(mixer=mixer, ffn=ffn) for ffn in ffns))


def _router(fields: Fields) -> RouterShape:
    fields.pin("scoring_func", "softmax")
    fields.pin("norm_topk_prob", False)  # the official class never normalises
    method = fields.take("topk_method", str, "greedy")
    num_groups, num_topk_groups = fields.take("n_group", int, 1), fields.take("topk_group", int, 1)
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refusal(f"topk_method is {method!r}; this line serves greedy, group_limited_greedy")
    is_grouped = method == "group_limited_greedy"
    return RouterShape(
        num_experts=fields.take("n_routed_experts", int),
        num_topk=fields.take("num_experts_per_tok", int),
        scoring="softmax",
        method=method,
        num_groups=num_groups if is_grouped else 1,
        num_topk_groups=num_topk_groups if is_grouped else 1,
        scale=fields.take("routed_scaling_factor", float, 1.0),
    )
