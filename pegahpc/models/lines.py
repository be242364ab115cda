"""The lines that pegahpc serves: exactly one claims a config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pegahpc.models import deepseek_v2, deepseek_v3, glm_moe_dsa, kimi_k3
from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.spec import ModelSpec

LINES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    model_type: line.probe
    for line in (deepseek_v2, deepseek_v3, glm_moe_dsa, kimi_k3)
    for model_type in line.MODEL_TYPES
}
WRAPPERS = ("kimi_k25",)  # multimodal shells around a text model that is another line's; it is served alone
TOWERS = ("vision_tower.", "mm_projector.", "multi_modal_projector.")  # their other parts


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        UnsupportedModel: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UnsupportedModel(f"{path}: {error.strerror}; is this the folder of a checkpoint?") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path}: is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path}: is no JSON object")
    return config


def probe(config: Mapping[str, Any]) -> ModelSpec:
    """Find the line of a config.json and read it.

    Raises:
        UnsupportedModel: no line claims it, or its line refuses a field.
    """
    model_type = config.get("model_type")
    if model_type in WRAPPERS:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModel(f"config.json: {model_type} has no text_config")
        shared = {name: config[name] for name in ("quantization_config",) if name in config}
        return replace(probe(shared | dict(text)), tensor_prefix="language_model.", other_towers=TOWERS)
    if not isinstance(model_type, str) or model_type not in LINES:
        known = ", ".join(sorted([*LINES, *WRAPPERS]))
        raise UnsupportedModel(f"config.json: model_type is {model_type!r}; pegahpc serves {known}")
    try:
        return LINES[model_type](config)
    except ValueError as error:
        raise error if isinstance(error, UnsupportedModel) else UnsupportedModel(f"config.json: {error}") from None
