"""Buckets, and padding rows that stay the same to the byte whatever traffic runs."""

from __future__ import annotations

import pytest
import torch
from engines import admit, build
from oracles import save_tiny

from pegahpc.engine.loop import Engine
from pegahpc.engine.runner import buckets
from pegahpc.engine.sequence import Span
from pegahpc.kernels.selected import REFERENCE

TORCH = [f"engine.backends.{op}={backend}" for op, backend in REFERENCE.items()]


@pytest.fixture(scope="module", params=["auto", "torch"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Engine:
    folder = save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")
    return build(folder, *(TORCH if request.param == "torch" else []))


def test_the_ladder_of_buckets() -> None:
    assert buckets(128) == [0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert buckets(1) == buckets(2) == [0, 2]
    assert buckets(5) == [0, 2, 4, 6]
    assert buckets(100) == [0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]


@pytest.mark.parametrize("max_rows", range(1, 140))
def test_every_count_of_rows_has_a_bucket_that_is_even(max_rows: int) -> None:
    sizes = buckets(max_rows)
    assert all(size % 2 == 0 for size in sizes) and sizes == sorted(set(sizes))
    assert max_rows <= sizes[-1] <= max_rows + 1


def rows_of(engine: Engine, lengths: list[int], starts: list[int], seed: int) -> torch.Tensor:
    """Hidden rows of one step with these spans, each on its own pages, after `starts` tokens of history."""
    generator = torch.Generator().manual_seed(seed)
    spans, sequences = [], []
    for number, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        tokens = torch.randint(3, 320, (start + length,), generator=generator).tolist()
        sequence = admit(engine, str(number), tokens)
        if start:
            engine.runner.forward([Span(sequence, 0, start)])
        spans.append(Span(sequence, start, length))
        sequences.append(sequence)
    out = engine.runner.forward(spans)
    for sequence in sequences:
        assert sequence.cache is not None
        sequence.cache.drop()
    return out


def test_an_idle_step_has_no_rows_and_touches_no_page(engine: Engine) -> None:
    before = engine.runner.slab.clone()
    assert engine.runner.forward([]).shape == (0, 64)
    assert torch.equal(engine.runner.slab, before)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([1], [0]),
        ([1], [99]),
        ([1], [120]),
        ([5], [0]),
        ([5, 1, 1], [30, 64, 3]),
        ([33], [0]),
        ([17, 9, 1, 1, 1], [0, 12, 1, 2, 95]),
        ([65], [17]),
    ],
)
def test_padding_rows_are_the_same_to_the_byte_whatever_traffic_runs(
    engine: Engine, lengths: list[int], starts: list[int]
) -> None:
    padding, live = rows_of(engine, [1], [0], 0)[1], sum(lengths)
    for seed in (1, 2):
        hidden = rows_of(engine, lengths, starts, seed)
        assert hidden.shape[0] > live, "a case without padding"
        for row in hidden[live:]:
            assert torch.equal(row, padding)
    assert torch.equal(rows_of(engine, [3], [7], 3)[3], padding)


def test_the_padding_page_holds_the_padding_row_and_nothing_else(engine: Engine) -> None:
    rows_of(engine, [17, 9, 1, 1, 1], [0, 12, 1, 2, 95], 1)
    page = engine.runner.slab[0]
    assert page[:, 0].any(dim=-1).all() and not page[:, 1:].any()
