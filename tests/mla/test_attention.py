"""A latent attention layer: the absorbed form over pages against the expanded one, and where it writes."""

from __future__ import annotations

import math

import pytest
import torch

from pegahpc.kernels.program import RowContext
from pegahpc.kernels.registry import Place
from pegahpc.kernels.selected import REFERENCE, select_kernels
from pegahpc.layers.rope_table import cis_table
from pegahpc.mla.attention import (
    AttentionStep,
    LatentAttention,
    LatentWeights,
    LayerCache,
    expanded_attention,
)
from pegahpc.mla.shape import LatentShape
from pegahpc.models.rope import Rope

HIDDEN, PAGE, LAYERS, LAYER = 37, 16, 3, 1
CPU = Place(device=torch.device("cpu"), row_invariant=True)
KERNELS = {
    "auto": select_kernels(CPU, {}),
    "torch": select_kernels(CPU, REFERENCE),
}
# (heads, q_lora, kv_lora, nope, rope, v)
SHAPES = {
    "one head": (1, None, 5, 3, 2, 7),
    "odd widths": (5, 11, 21, 9, 6, 13),
    "with q_lora": (4, 32, 24, 16, 8, 12),
}


def randn(*shape: int, seed: int) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise / math.sqrt(shape[-2])


def shape_of(name: str) -> LatentShape:
    heads, q_lora, kv_lora, nope, rope, v = SHAPES[name]
    return LatentShape(num_heads=heads, q_lora_rank=q_lora, kv_lora_rank=kv_lora, qk_nope_head_dim=nope,
                        qk_rope_head_dim=rope, v_head_dim=v, softmax_scale=0.7, latent_norm_eps=1e-6)  # fmt: skip


def weights_of(name: str) -> LatentWeights:
    heads, q_lora, kv_lora, nope, rope, v = SHAPES[name]
    q_dim = heads * (nope + rope)
    return LatentWeights(
        qkv_a_HX=randn(HIDDEN, (q_lora or q_dim) + kv_lora + rope, seed=1),
        q_a_norm=1 + randn(1, q_lora, seed=2)[0] if q_lora else None,
        q_b=randn(q_lora, q_dim, seed=3) if q_lora else None,
        kv_a_norm_C=1 + randn(1, kv_lora, seed=4)[0] * 0.3,
        w_uk_NPC=randn(heads, nope, kv_lora, seed=5),
        w_uv_NCV=randn(heads, kv_lora, v, seed=6),
        o_proj=randn(heads * v, HIDDEN, seed=7),
    )


def layer_of(name: str, kernels: str = "auto") -> LatentAttention:
    return LatentAttention(shape_of(name), weights_of(name), KERNELS[kernels])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, rope] at positions 0, 1, ..., each pair as a complex number turned by its angle."""
    rope = x.shape[-1]
    angles = torch.arange(x.shape[0])[:, None] / 100.0 ** (torch.arange(0, rope, 2) / rope)
    pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).clone(memory_format=torch.contiguous_format))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def expanded(name: str, x: torch.Tensor, first: int) -> torch.Tensor:
    """Rows first, first + 1, ... of the whole sequence x, by the expanded form."""
    shape, weights = shape_of(name), weights_of(name)
    q, latent, k_pe = torch.split(
        x @ weights.qkv_a_HX, [weights.qkv_a_HX.shape[1] - shape.row_dim, shape.kv_lora_rank, shape.qk_rope_head_dim], 1
    )
    if weights.q_b is not None:
        assert weights.q_a_norm is not None
        q = norm(q, weights.q_a_norm) @ weights.q_b
    q_TNX = torch.unflatten(q, 1, (shape.num_heads, -1))
    q_TNX = torch.cat((q_TNX[..., : shape.qk_nope_head_dim], turned(q_TNX[..., shape.qk_nope_head_dim :])), dim=-1)
    keys = turned(k_pe[:, None])[:, 0]
    latent = norm(latent, weights.kv_a_norm_C)
    return expanded_attention(q_TNX[first:], latent, keys, weights, shape, first_position=first) @ weights.o_proj


def by_chunks(layer: LatentAttention, x: torch.Tensor, sizes: list[int], slab: torch.Tensor) -> torch.Tensor:
    """The layer over the sequence in chunks, on pages in descending order."""
    pages = list(range(slab.shape[0] - 1, 0, -1))
    num_blocks = 256 // PAGE * -(-x.shape[0] // 256)
    blocks = torch.tensor((pages + [0] * num_blocks)[:num_blocks])[None] * LAYERS
    cis = cis_table(Rope(dim=layer.shape.qk_rope_head_dim, theta=100.0, max_position=512), 512)
    cache, out, first = LayerCache(slab, LAYER), [], 0
    for size in sizes:
        positions = torch.arange(first, first + size)
        step = AttentionStep(
            cis_TR=cis[positions],
            row_idx_T=blocks[0, positions // PAGE] * PAGE + positions % PAGE,
            contexts=(RowContext(first_row=0, num_rows=size, block_idx_GP=blocks, seq_lens_T=positions + 1),),
        )
        out.append(layer.forward(x[first : first + size], step, cache))
        first += size
    assert first == x.shape[0]
    return torch.cat(out)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sizes", [[1], [40], [13, 27], [5, 1, 1, 33], [250, 40]], ids=str)
def test_the_absorbed_form_equals_the_expanded_one(name: str, sizes: list[int], kernels: str) -> None:
    layer, x = layer_of(name, kernels), randn(sum(sizes), HIDDEN, seed=9) * 6
    slab = torch.zeros(25, LAYERS, PAGE, layer.shape.row_dim)
    got = by_chunks(layer, x, sizes, slab)
    torch.testing.assert_close(got, expanded(name, x, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_the_expanded_form_of_a_chunk_is_that_of_the_whole(name: str) -> None:
    x = randn(40, HIDDEN, seed=9)
    torch.testing.assert_close(expanded(name, x, 29), expanded(name, x, 0)[29:], rtol=1e-5, atol=1e-5)


def test_a_token_sees_nothing_that_comes_after_it() -> None:
    layer, x = layer_of("odd widths"), randn(40, HIDDEN, seed=9)
    other = torch.cat((x[:20], randn(20, HIDDEN, seed=10)))
    slabs = [torch.zeros(25, LAYERS, PAGE, layer.shape.row_dim) for _ in range(2)]
    whole, changed = by_chunks(layer, x, [40], slabs[0]), by_chunks(layer, other, [40], slabs[1])
    assert torch.equal(whole[:20], changed[:20])
    assert not torch.equal(whole[20:], changed[20:])


def test_a_layer_writes_its_own_rows_of_its_own_pages_only() -> None:
    layer, x = layer_of("odd widths"), randn(21, HIDDEN, seed=9)
    slab = torch.zeros(6, LAYERS, PAGE, layer.shape.row_dim)
    by_chunks(layer, x, [13, 8], slab)
    written = {(page, lay, offset) for page, lay, offset in slab.any(-1).nonzero().tolist()}
    assert written == {(5, LAYER, offset) for offset in range(16)} | {(4, LAYER, offset) for offset in range(5)}


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_layers_view_writes_where_plain_indexing_reads(page_tokens: int) -> None:
    slab = torch.zeros(5, LAYERS, page_tokens, 4)
    for layer in range(LAYERS):
        cache = LayerCache(slab, layer)
        for page in range(5):
            for offset in range(page_tokens):
                row = torch.tensor([page, layer, offset, 1.0])
                cache.rows_YD[page * LAYERS * page_tokens + offset] = row
                assert torch.equal(slab[page, layer, offset], row)
                assert torch.equal(cache.blocks_XPD[page * LAYERS, offset], row)
    assert slab[..., 3].all()
