"""A model line as data: what the decoder builds, what the loader reads, what a plan counts. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pegahpc.kernels.weight_format import WeightFormat
from pegahpc.mla.shape import LatentShape
from pegahpc.models.mixers import LatentMixer, Mixer
from pegahpc.models.rope import Rope
from pegahpc.moe.shape import RouterShape


@dataclass(frozen=True, kw_only=True)
class Situ:
    """SiTU in the place of silu(gate) * up: b * tanh(gate / b) * sigmoid(gate) * (l * tanh(up / l)).

    Source: Kimi K3 (arXiv:2607.24653).
    """

    beta: float
    linear_beta: float


@dataclass(frozen=True, kw_only=True)
class DenseFFN:
    """SwiGLU of this width."""

    intermediate_size: int
    situ: Situ | None = None  # None: silu


@dataclass(frozen=True, kw_only=True)
class LatentExperts:
    """Routed experts between a down- and an up-projection: up(norm(sum of experts(down(x)))).

    The router and the shared expert see the hidden state itself.
    """

    hidden_size: int
    has_norm: bool


@dataclass(frozen=True, kw_only=True)
class MoEFFN:
    """Routed SwiGLU experts of this width, and a shared one (0: none) that every token visits."""

    router: RouterShape
    intermediate_size: int
    shared_intermediate_size: int
    situ: Situ | None = None  # None: silu
    latent: LatentExperts | None = None  # None: experts see the hidden state


FFN = DenseFFN | MoEFFN


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer."""

    mixer: Mixer
    ffn: FFN


@dataclass(frozen=True, kw_only=True)
class AttentionResiduals:
    """Residuals that are chosen by attention over snapshots of the stream, in the place of a running sum.

    Before the mixer and before the FFN of every layer, and after the last: softmax over the snapshots and the running
    sum, scores rms(candidate) * norm_w . proj_w, values the candidates themselves. At each layer whose number is a
    multiple of `block_size` the running sum becomes a snapshot (after the mixer's choice) and starts again.

    Source: attention residuals (arXiv:2603.15031).
    """

    block_size: int

    def num_snapshots(self, num_layers: int) -> int:
        """Snapshots of a row at the end; a slab's stride, however many of them are filled."""
        return -(-num_layers // self.block_size)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Native multi-token prediction: layers on disk after the last, each with its own cache.

    u = eh_proj([rms(embed(token); enorm) | rms(hidden; hnorm)]), with zeros for the embedding at position 0; then the
    layer; logits = lm_head(rms(layer(u); shared_head.norm)). The first hidden is the model's, after its final norm.
    """

    num_layers: int
    layer: LayerSpec
    chains_normed: bool  # the hidden handed to the next draft: after shared_head.norm (True) or before it
    shares_selection: bool = False  # later drafts of a round may reuse the indexer's choice of the first


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which matrices a checkpoint packs, by config.json; what each one is says the checkpoint itself."""

    format: WeightFormat
    covers_body: bool  # attention, dense and shared FFNs too, not routed experts alone


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """What lines call the same things."""

    moe: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"  # these three of a routed expert


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One checkpoint's model, whatever its line."""

    line: str
    hidden_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    residuals: AttentionResiduals | None = None  # None: sums
    prediction: Prediction | None = None
    quantization: Quantization | None = None
    names: TensorNames = TensorNames()
    tensor_prefix: str = ""  # before "model." and "lm_head." in the checkpoint's names
    other_towers: tuple[str, ...] = ()  # a multimodal checkpoint's parts that are not read, by how their names start

    @property
    def num_layers(self) -> int:
        """Decoder layers, without multi-token-prediction layers."""
        return len(self.layers)

    @property
    def num_mtp_layers(self) -> int:
        """Multi-token-prediction layers on disk."""
        return self.prediction.num_layers if self.prediction else 0

    @property
    def ffns(self) -> tuple[FFN, ...]:
        """One a layer."""
        return tuple(layer.ffn for layer in self.layers)

    @property
    def latent(self) -> LatentMixer:
        """The first of the latent mixers, whose shape, rope and indexer all of them share."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, LatentMixer))

    @property
    def attention(self) -> LatentShape:
        """Shape of every latent mixer."""
        return self.latent.shape

    @property
    def rope(self) -> Rope | None:
        """Rotation in every latent mixer."""
        return self.latent.rope

    @property
    def num_experts(self) -> int:
        """Routed experts of a MoE layer; 0 for a dense model."""
        return max((ffn.router.num_experts for ffn in self.ffns if isinstance(ffn, MoEFFN)), default=0)
