"""Latent attention and its rows: every backend against plain softmax in float64, and its bits by row."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

import pegahpc.kernels.selected  # noqa: F401  (registers)
from pegahpc.kernels.latent_attention import SPLIT_TOKENS
from pegahpc.kernels.registry import Place, backends_of, select

INVARIANT = Place(device=torch.device("cpu"), row_invariant=True)
CPU = Place(device=torch.device("cpu"))
ATTENTION = backends_of("latent_attention", CPU)
ROWS = backends_of("latent_rows", CPU)
LATENT, ROTARY = 21, 6
DIM = LATENT + ROTARY
SCALE = 0.37
NUM_BLOCKS = 1500
CLOSE = 1e-5  # float32, sums of at most 700 weighted rows of size 1


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Cache:
    """Blocks in a shuffled order, and the rows that a list of them holds."""

    def __init__(self, page_tokens: int, length: int) -> None:
        self.page_tokens = page_tokens
        needed = -(-length // SPLIT_TOKENS) * SPLIT_TOKENS // page_tokens
        self.blocks = randn(NUM_BLOCKS * 2 // page_tokens + needed + 4, page_tokens, DIM)
        self.num_needed = needed

    def block_idx(self, num_contexts: int, length: int, seed: int = 3) -> torch.Tensor:
        """[num_contexts, pages]: pages of the context, then block 0."""
        used = -(-length // self.page_tokens)
        out = torch.zeros(num_contexts, self.num_needed, dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        for context in range(num_contexts):
            out[context, :used] = torch.randperm(self.blocks.shape[0] - 1, generator=generator)[:used] + 1
        return out

    def rows(self, block_idx: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.blocks[block] for block in block_idx.tolist()])


def attend(q: torch.Tensor, rows: torch.Tensor, length: int, scale: float = SCALE) -> torch.Tensor:
    """softmax(q k) v of one row in float64: [heads, latent]."""
    seen = rows[:length].double()
    return ((q.double() @ seen.T) * scale).softmax(-1) @ seen[:, :LATENT]


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("num_heads", [1, 5])
def test_decode_rows_with_a_context_each_match_float64(
    backend: str, page_tokens: int, length: int, num_heads: int
) -> None:
    cache, lengths = Cache(page_tokens, length), [length, 1, (length + 1) // 2]
    block_idx, q = cache.block_idx(3, length), randn(3, num_heads, DIM, seed=1)
    kernel = select("latent_attention", CPU, backend)
    got = kernel(q, cache.blocks, block_idx, torch.tensor(lengths), kv_lora_rank=LATENT, scale=SCALE)
    assert got.shape == (3, num_heads, LATENT)
    for row in range(3):
        want = attend(q[row], cache.rows(block_idx[row]), lengths[row])
        torch.testing.assert_close(got[row].double(), want, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize(("first", "num_rows"), [(0, 1), (0, 7), (250, 13), (600, 100)])
def test_a_chunk_sees_its_past_and_itself_causally(backend: str, first: int, num_rows: int) -> None:
    length = first + num_rows
    cache = Cache(16, length)
    block_idx, q = cache.block_idx(1, length), randn(num_rows, 5, DIM, seed=1)
    seq_lens = torch.arange(first, length) + 1
    kernel = select("latent_attention", CPU, backend)
    got = kernel(q, cache.blocks, block_idx, seq_lens, kv_lora_rank=LATENT, scale=SCALE)
    rows = cache.rows(block_idx[0])
    want = torch.stack([attend(q[row], rows, first + row + 1) for row in range(num_rows)])
    torch.testing.assert_close(got.double(), want, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("backend", ATTENTION)
def test_no_rows_give_no_rows(backend: str) -> None:
    cache = Cache(16, 256)
    kernel = select("latent_attention", CPU, backend)
    lengths = torch.zeros(0, dtype=torch.int64)
    got = kernel(randn(0, 5, DIM), cache.blocks, cache.block_idx(1, 16), lengths, kv_lora_rank=LATENT, scale=SCALE)
    assert got.shape == (0, 5, LATENT)


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("loud", [0, 100, 300, 511])
def test_scores_that_differ_by_two_hundred_leave_the_loudest_token(backend: str, loud: int) -> None:
    """The others weigh e^-200, which float32 does not have; in the loud token's split and in the other one."""
    blocks = torch.zeros(32 + 1, 16, DIM)
    blocks[1:, :, 0] = -100.0
    blocks[1 + loud // 16, loud % 16, :3] = torch.tensor([100.0, 7.0, -3.0])
    q = torch.zeros(1, 1, DIM)
    q[..., 0] = 1.0
    block_idx = torch.arange(1, 33)[None]
    kernel = select("latent_attention", CPU, backend)
    got = kernel(q, blocks, block_idx, torch.tensor([512]), kv_lora_rank=LATENT, scale=1.0)
    torch.testing.assert_close(got[0, 0, :4], torch.tensor([100.0, 7.0, -3.0, 0.0]))


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("score", [-1e4, 1e4, 0.0])
def test_equal_scores_of_any_size_average_the_values(backend: str, score: float) -> None:
    blocks = randn(21, 16, DIM)
    blocks[..., LATENT] = score
    q = torch.zeros(1, 1, DIM)
    q[..., LATENT] = 1.0
    block_idx = torch.cat((torch.arange(1, 21), torch.zeros(12, dtype=torch.int64)))[None]
    kernel = select("latent_attention", CPU, backend)
    got = kernel(q, blocks, block_idx, torch.tensor([311]), kv_lora_rank=LATENT, scale=1.0)
    want = blocks[1:].flatten(0, 1)[:311, :LATENT].double().mean(0)
    torch.testing.assert_close(got[0, 0].double(), want, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("backend", ATTENTION)
def test_what_lies_beyond_a_context_never_shows(backend: str) -> None:
    """Large finite rows in the same page, in the padding block, and in blocks of the table's tail."""
    cache = Cache(16, 512)
    block_idx, q = cache.block_idx(2, 512), randn(2, 5, DIM, seed=1)
    kernel, lengths = select("latent_attention", CPU, backend), torch.tensor([37, 300])
    clean = kernel(q, cache.blocks, block_idx, lengths, kv_lora_rank=LATENT, scale=SCALE)
    for row, length in enumerate(lengths.tolist()):
        cache.blocks[block_idx[row, length // 16], length % 16 :] = 1e15
        block_idx[row, length // 16 + 1 :] = 0
    cache.blocks[0] = -1e15
    got = kernel(q, cache.blocks, block_idx, lengths, kv_lora_rank=LATENT, scale=SCALE)
    assert torch.equal(got, clean)


@pytest.mark.parametrize("backend", backends_of("latent_attention", INVARIANT))
@pytest.mark.parametrize("num_heads", [1, 5])
def test_a_row_keeps_its_bits_alone_in_a_chunk_and_among_others(backend: str, num_heads: int) -> None:
    cache, length = Cache(16, 700), 700
    block_idx, q = cache.block_idx(1, length), randn(40, num_heads, DIM, seed=1)
    kernel, lengths = select("latent_attention", INVARIANT, backend), torch.arange(661, 701)

    def run(rows: slice, blocks: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = kernel(q[rows], cache.blocks, blocks, lens, kv_lora_rank=LATENT, scale=SCALE)
        return out

    whole = run(slice(0, 40), block_idx, lengths)
    for rows in (slice(0, 1), slice(39, 40), slice(3, 5), slice(11, 28)):
        assert torch.equal(run(rows, block_idx, lengths[rows]), whole[rows])
        each = block_idx.expand(rows.stop - rows.start, -1).contiguous()
        assert torch.equal(run(rows, each, lengths[rows]), whole[rows])


@pytest.mark.parametrize("backend", backends_of("latent_attention", INVARIANT))
def test_a_short_row_keeps_its_bits_beside_a_long_one_and_on_other_pages(backend: str) -> None:
    cache = Cache(16, 700)
    block_idx, q = cache.block_idx(2, 700), randn(2, 5, DIM, seed=1)
    kernel = select("latent_attention", INVARIANT, backend)
    args = {"kv_lora_rank": LATENT, "scale": SCALE}
    beside = kernel(q, cache.blocks, block_idx, torch.tensor([91, 700]), **args)
    alone = kernel(q[:1], cache.blocks, block_idx[:1, :16], torch.tensor([91]), **args)
    assert torch.equal(beside[:1], alone)
    moved = cache.blocks.flip(0).contiguous()
    elsewhere = cache.blocks.shape[0] - 1 - block_idx[:1, :16]
    assert torch.equal(kernel(q[:1], moved, elsewhere, torch.tensor([91]), **args), alone)


def cis_of(positions: list[int]) -> torch.Tensor:
    """cos and sin by pair, interleaved, of three frequencies."""
    table = [[f(p * w) for w in (1.0, 0.1, 0.01) for f in (math.cos, math.sin)] for p in positions]
    return torch.tensor(table).view(len(positions), ROTARY)


def rotated(values: list[float], position: int) -> list[float]:
    """Each pair as a complex number, times e^(i position w)."""
    out: list[float] = []
    for pair, w in enumerate((1.0, 0.1, 0.01)):
        z = complex(values[2 * pair], values[2 * pair + 1]) * cmath.exp(1j * position * w)
        out += [z.real, z.imag]
    return out


@pytest.mark.parametrize("backend", ROWS)
@pytest.mark.parametrize("num_heads", [1, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_rows_are_rotated_joined_and_written_where_they_belong(backend: str, num_heads: int, num_rows: int) -> None:
    positions, places = [0, 1, 5, 100, 17, 3, 2][:num_rows], [3, 0, 9, 5, 6, 8, 1][:num_rows]
    q, absorbed = randn(num_rows, num_heads, 4 + ROTARY), randn(num_heads, num_rows, LATENT, seed=1)
    joined = randn(num_rows, LATENT + ROTARY + 5, seed=2)  # the key's rotary part is a slice of wider rows
    latent, k_pe = joined[:, :LATENT].contiguous(), joined[:, LATENT : LATENT + ROTARY]
    cache = torch.full((12, DIM), 9.0)
    idx = torch.tensor(places, dtype=torch.int64)
    got = select("latent_rows", CPU, backend)(q, absorbed, latent, k_pe, cis_of(positions), cache, idx)
    assert got.shape == (num_rows, num_heads, DIM)
    want_cache = torch.full((12, DIM), 9.0)
    for row, (position, place) in enumerate(zip(positions, places, strict=True)):
        want_cache[place] = torch.tensor([*latent[row].tolist(), *rotated(k_pe[row].tolist(), position)])
        for head in range(num_heads):
            want = [*absorbed[head, row].tolist(), *rotated(q[row, head, 4:].tolist(), position)]
            torch.testing.assert_close(got[row, head], torch.tensor(want), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, want_cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ROWS)
@pytest.mark.parametrize("nope", [0, 1, 4])
def test_queries_that_are_a_slice_of_wider_rows_are_read_right(backend: str, nope: int) -> None:
    """The copy that a backend makes of them must live until it has been read."""
    wide, absorbed = randn(9, 2 * (nope + ROTARY) + 7), randn(2, 9, LATENT, seed=1)
    q = torch.unflatten(wide[:, : 2 * (nope + ROTARY)], 1, (2, nope + ROTARY))
    latent, k_pe, idx = randn(9, LATENT, seed=2), randn(9, ROTARY, seed=3), torch.arange(9)
    kernel, cis = select("latent_rows", CPU, backend), cis_of(list(range(9)))
    got = kernel(q, absorbed, latent, k_pe, cis, torch.zeros(9, DIM), idx)
    assert torch.equal(got, kernel(q.clone(), absorbed, latent, k_pe, cis, torch.zeros(9, DIM), idx))
    want = [[rotated(q[t, n, nope:].tolist(), t) for n in range(2)] for t in range(9)]
    torch.testing.assert_close(got[..., LATENT:], torch.tensor(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", backends_of("latent_rows", INVARIANT))
def test_rows_keep_their_bits_whatever_stands_beside_them(backend: str) -> None:
    kernel, positions = select("latent_rows", INVARIANT, backend), list(range(33))
    q, absorbed, latent, k_pe = randn(33, 5, 10), randn(5, 33, LATENT), randn(33, LATENT), randn(33, ROTARY)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(33, DIM)
        idx = torch.arange(33)[rows]
        parts = (q[rows], absorbed[:, rows].contiguous(), latent[rows], k_pe[rows], cis_of(positions)[rows])
        return kernel(*parts, cache, idx), cache[rows]

    whole, written = run(slice(0, 33))
    for rows in (slice(0, 1), slice(2, 4), slice(9, 26)):
        got, cache = run(rows)
        assert torch.equal(got, whole[rows]) and torch.equal(cache, written[rows])


@pytest.mark.parametrize("backend", ROWS)
def test_padding_rows_may_share_one_place(backend: str) -> None:
    one_row = (randn(1, 2, 10), randn(1, 2, LATENT), randn(1, LATENT), randn(1, ROTARY))
    q, absorbed, latent, k_pe = (t.expand(3, *t.shape[1:]).contiguous() for t in one_row)
    cache = torch.zeros(4, DIM)
    heads_first = absorbed.transpose(0, 1).contiguous()
    idx = torch.zeros(3, dtype=torch.int64)
    select("latent_rows", CPU, backend)(q, heads_first, latent, k_pe, cis_of([0, 0, 0]), cache, idx)
    torch.testing.assert_close(cache[0], torch.cat((latent[0], k_pe[0])))
    assert not cache[1:].any()
