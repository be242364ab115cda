"""Telling that a checkpoint is another line's than its config.json: one fault in the place of thousands. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pegahpc.models.spec import ModelSpec

# What a line alone has among those above it, the most particular first.
MARKS = (
    ("kimi_k3", re.compile(r"_res_proj\.weight$|\.self_attn\.dt_bias$")),
    ("glm_moe_dsa", re.compile(r"\.self_attn\.indexer\.")),
    ("deepseek_v3", re.compile(r"\.mlp\.gate\.e_score_correction_bias$")),
    ("deepseek_v2", re.compile(r"\.self_attn\.kv_a_proj_with_mqa\.")),
)
FIRST_LAYER = re.compile(r"(.*?)model\.layers\.0\.")
PACKED = re.compile(r"\.weight_(scale_inv|packed)$")


def sibling(spec: ModelSpec, names: Iterable[str]) -> str | None:
    """What is wrong with the checkpoint as a whole, in one line; None: it is this line's."""
    names = list(names)
    for line, mark in MARKS:
        if found := next((name for name in names if mark.search(name)), None):
            if line != spec.line:
                return f"config.json is one of {spec.line}, the tensors are those of {line} (there is {found})"
            break
    prefixes = {match[1] for name in names if (match := FIRST_LAYER.match(name))}
    if prefixes and spec.tensor_prefix not in prefixes:
        found = min(prefixes)
        return f"config.json wants names that start with '{spec.tensor_prefix}model.', the tensors' start with '{found}model.'"  # fmt: skip  # noqa: E501
    packed = next((name for name in names if PACKED.search(name)), None)
    if packed and spec.quantization is None:
        return f"config.json has no quantization_config, but matrices are packed (there is {packed})"
    return None
