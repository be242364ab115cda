"""A line's cache groups and the layout of a page, in bytes: from the model's data alone. No torch.

A page holds so many tokens of every Append group of every layer, one layer after the other. A State group has a slot
for each request that runs, of the same size however long the request is.
"""

from __future__ import annotations

from dataclasses import dataclass

from pegahpc.models.mixers import DeltaMixer, Indexer, LatentMixer, Mixer
from pegahpc.models.spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
FORMATS = ("float32", "bfloat16", "fp8")
SCALE_BYTES, SCALE_GROUP, ROPE_BYTES = 4, 128, 2  # of an fp8 row: float32 scales, one for 128 codes; bfloat16 keys


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """One kind of cache, in each of the layers that have it."""

    name: str
    kind: str  # "append": rows of a page; "state": a slot for each running request
    num_layers: int
    layer_bytes: int  # of one layer: a token's row, or a slot


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """All groups of a line, for one format of rows."""

    groups: tuple[CacheGroup, ...]
    page_tokens: int
    stride_multiple: int = 1  # a page is padded to a multiple of so many bytes

    @property
    def bytes_per_token(self) -> int:
        """Of all Append groups and layers, without a page's padding."""
        return sum(group.num_layers * group.layer_bytes for group in self.groups if group.kind == "append")

    @property
    def page_stride_bytes(self) -> int:
        """From one page to the next: it names the layout."""
        content = self.bytes_per_token * self.page_tokens
        return -(-content // self.stride_multiple) * self.stride_multiple

    @property
    def state_bytes_per_slot(self) -> int:
        """Of all State groups and layers; 0 for a line without."""
        return sum(group.num_layers * group.layer_bytes for group in self.groups if group.kind == "state")


def cache_layout(spec: ModelSpec, format: str, page_tokens: int) -> CacheLayout:
    """Groups in the order in which a layer has them.

    Args:
        format: of Append rows: an engine's type, or "fp8": E4M3 latents with float32 scales of 128 dims and bfloat16
            keys, and E4M3 indexer keys with one float32 scale. A page of fp8 rows is also what other fleets are sent,
            so it holds the rows of multi-token-prediction layers whether they run or not, and its stride is a
            multiple of a latent row.

    Source: the 656-byte row of FlashMLA's sparse decode, the 132-byte row of DeepGEMM's indexer.
    """
    mixers: list[Mixer] = [layer.mixer for layer in spec.layers]
    if format == "fp8" and spec.prediction:
        mixers += [spec.prediction.layer.mixer] * spec.prediction.num_layers
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentMixer)]
    deltas = [mixer for mixer in mixers if isinstance(mixer, DeltaMixer)]
    row = _latent_row_bytes(latents[0], format)
    groups = [CacheGroup(name="latent", kind="append", num_layers=len(latents), layer_bytes=row)]
    own = [mixer.indexer for mixer in latents if mixer.indexer and mixer.has_own_indexer]
    if own:
        key = _index_row_bytes(own[0], format)
        groups.append(CacheGroup(name="index_key", kind="append", num_layers=len(own), layer_bytes=key))
    if deltas:
        state = deltas[0].state_bytes(ITEM_BYTES.get(format, ROPE_BYTES))
        groups.append(CacheGroup(name="delta_state", kind="state", num_layers=len(deltas), layer_bytes=state))
    return CacheLayout(groups=tuple(groups), page_tokens=page_tokens, stride_multiple=row if format == "fp8" else 1)


def _latent_row_bytes(mixer: LatentMixer, format: str) -> int:
    shape = mixer.shape
    if format != "fp8":
        return shape.row_dim * ITEM_BYTES[format]
    return shape.kv_lora_rank + shape.kv_lora_rank // SCALE_GROUP * SCALE_BYTES + shape.qk_rope_head_dim * ROPE_BYTES


def _index_row_bytes(indexer: Indexer, format: str) -> int:
    return indexer.head_dim + SCALE_BYTES if format == "fp8" else indexer.head_dim * ITEM_BYTES[format]
