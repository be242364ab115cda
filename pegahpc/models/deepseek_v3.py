"""DeepSeek-V3 and Kimi-K2's text model: latent attention, sigmoid router with a selection bias (noaux_tc)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegahpc.models.fields import Fields
from pegahpc.models.latent_moe import leading_dense, model_spec, noaux_router, rotary_mixer
from pegahpc.models.spec import LayerSpec, ModelSpec, Prediction

MODEL_TYPES = ("deepseek_v3", "kimi_k2")


def probe(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json of this line.

    Raises:
        UnsupportedModel: a field of another structure, missing, of a wrong type, or unknown.
    """
    fields = Fields(config)
    fields.pin("rope_interleave", True)
    fields.inert("num_mtp_layers", "num_local_experts")
    mixer = rotary_mixer(fields)
    fields.pin("head_dim", mixer.shape.qk_rope_head_dim)
    ffns = leading_dense(fields, noaux_router(fields))
    num_mtp_layers = fields.take("num_nextn_predict_layers", int, 0)
    prediction = None
    if num_mtp_layers:
        layer = LayerSpec(mixer=mixer, ffn=ffns[-1])
        prediction = Prediction(num_layers=num_mtp_layers, layer=layer, chains_normed=False)
    layers = tuple(LayerSpec(mixer=mixer, ffn=ffn) for ffn in ffns)
    return model_spec(fields, line="deepseek_v3", layers=layers, prediction=prediction)
