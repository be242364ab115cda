"""Logits gates against the official classes, float32: at most 2e-4 of the logits' range, whatever the path.

Every negative control must move the logits by ten times that limit; `-rA` shows by how much each did.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build, logits_by_chunks
from faults import FAULTS, engine_with, ignore_the_router_bias
from oracles import TINY, TINY_MOE, load_oracle, oracle_logits, save_tiny

from pegahpc.engine.loop import Engine
from pegahpc.kernels.selected import REFERENCE
from pegahpc.models.lines import probe, read_config

LIMIT = 2e-4
NAMES = [*TINY, "tiny-moe"]


def tokens_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (count,), generator=generator).tolist()


SEQUENCES = [tokens_of(61, 1), tokens_of(17, 2), tokens_of(40, 3)]


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return TINY_MOE if name == "tiny-moe" else save_tiny(tmp_path_factory.mktemp(name), name)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[torch.Tensor]:
    oracle = load_oracle(checkpoint)
    return [oracle_logits(oracle, tokens) for tokens in SEQUENCES]


def new_engine(checkpoint: Path, *overrides: str) -> Engine:
    return build(checkpoint, *overrides, num_experts=16 if checkpoint == TINY_MOE else 8)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return new_engine(checkpoint)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference as a share of the oracle's range."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / (want.max() - want.min()))


PATHS = {
    "whole prompt": [64],
    "token by token": [1],
    "chunks of 7": [7],
    "a chunk, then decode": [13, 1],
}


@pytest.mark.parametrize("path", PATHS)
def test_each_sequence_alone_is_inside_the_gate(engine: Engine, wanted: list[torch.Tensor], path: str) -> None:
    for tokens, want in zip(SEQUENCES, wanted, strict=True):
        (got,) = logits_by_chunks(engine, [tokens], PATHS[path])
        assert distance(got, want) <= LIMIT


def test_the_batched_sequences_are_inside_the_gate(engine: Engine, wanted: list[torch.Tensor]) -> None:
    for got, want in zip(logits_by_chunks(engine, SEQUENCES, [11, 5, 1, 1, 8]), wanted, strict=True):
        assert distance(got, want) <= LIMIT


def test_every_path_gives_the_same_bits(engine: Engine) -> None:
    (reference,) = logits_by_chunks(engine, SEQUENCES[:1], [64])
    for chunks in PATHS.values():
        assert torch.equal(logits_by_chunks(engine, SEQUENCES[:1], chunks)[0], reference)
        assert torch.equal(logits_by_chunks(engine, SEQUENCES, chunks)[0], reference)


TILES = [f"engine.backends.{op}={backend}" for op, backend in REFERENCE.items()]
EVEN = [override.replace("torch", "even") if "matmul" in override or "grouped" in override else override
        for override in TILES]  # fmt: skip


@pytest.mark.parametrize("backends", [TILES, EVEN], ids=["tiles", "even"])
def test_the_torch_backends_are_inside_the_gate_and_row_invariant_too(
    checkpoint: Path, wanted: list[torch.Tensor], backends: list[str]
) -> None:
    engine = new_engine(checkpoint, *backends)
    (reference,) = logits_by_chunks(engine, SEQUENCES[:1], [64])
    assert distance(reference, wanted[0]) <= LIMIT
    for chunks in PATHS.values():
        assert torch.equal(logits_by_chunks(engine, SEQUENCES, chunks)[0], reference)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_moves_the_logits_by_ten_times_the_limit(
    checkpoint: Path,
    wanted: list[torch.Tensor],
    fault: Callable[[Any], None],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault is ignore_the_router_bias and probe(read_config(checkpoint)).line == "deepseek_v2":
        return  # it has no bias to ignore
    engine = engine_with(fault, lambda: new_engine(checkpoint), monkeypatch)
    moved = distance(logits_by_chunks(engine, SEQUENCES[:1], [64])[0], wanted[0])
    print(f"{checkpoint.name}: {fault.__name__} moved the logits by {moved:.4f} of their range")
    record_property("moved", moved)
    assert moved >= 10 * LIMIT
