"""Which parts of a line the engine has: a line whose data is known may have parts that are not there yet."""

from __future__ import annotations

from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.mixers import DeltaMixer, LatentMixer
from pegahpc.models.spec import ModelSpec, MoEFFN


def refuse_unserved(spec: ModelSpec) -> None:
    """Refuse to serve a model whose parts the decoder does not have; planning for it needs no decoder.

    Raises:
        UnsupportedModel: names every part that is not served.
    """
    mixers = [layer.mixer for layer in spec.layers]
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentMixer)]
    parts = {
        "sparse attention (an indexer)": any(mixer.indexer for mixer in latents),
        "latent attention without positions": any(mixer.rope is None for mixer in latents),
        "an output gate on attention": any(mixer.has_output_gate for mixer in latents),
        "Kimi Delta Attention": any(isinstance(mixer, DeltaMixer) for mixer in mixers),
        "attention residuals": spec.residuals is not None,
        "SiTU": any(ffn.situ for ffn in spec.ffns),
        "experts in a latent width": any(isinstance(ffn, MoEFFN) and ffn.latent for ffn in spec.ffns),
    }
    if missing := [name for name, is_there in parts.items() if is_there]:
        raise UnsupportedModel(f"config.json: {spec.line} has parts that pegahpc does not serve: {', '.join(missing)}")
