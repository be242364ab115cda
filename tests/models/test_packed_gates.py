"""Packed checkpoints against the official class, whose weights are the same values written out by hand: float32.

At most 2e-4 of the logits' range, whatever the path; the same bits packed or unpacked, and on every EP width. Each
control is a fault of a format's layout, and must move the logits by ten times that limit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build, logits_by_chunks, record_logits, request, run
from oracles import SHAPE, load_oracle, oracle_logits, save_tiny
from packed_checkpoints import (
    METHODS,
    Tensors,
    flip_signs_of_zero_point,
    packed,
    roll_scales,
    swap_nibbles,
    turn_scale_blocks,
    written_out,
)
from tensor_files import Checkpoint
from transformers import DeepseekV3ForCausalLM, FineGrainedFP8Config
from worlds import run_world

from pegahpc.wire.messages import Sampling

LIMIT = 2e-4
TOKENS = torch.randint(3, 320, (61,), generator=torch.Generator().manual_seed(1)).tolist()
PATHS = {"whole prompt": [64], "token by token": [1], "chunks of 7": [7]}
GATED = ["fp8", "int4", "mxfp4"]
PACKED, UNPACKED = "engine.packed_experts=true", "engine.packed_experts=false"
CHANGES: dict[str, dict[str, Any]] = {"fp8": {}, "int4": {"model_type": "kimi_k2"}, "mxfp4": {}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("original"), "v3-groups")


@pytest.fixture(scope="module", params=GATED)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(original: Path, method: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    checkpoint = packed(tmp_path_factory.mktemp(method), original, method, **CHANGES[method])
    checkpoint.sharded()
    return checkpoint


@pytest.fixture(scope="module")
def wanted(checkpoint: Checkpoint, method: str, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = written_out(tmp_path_factory.mktemp(f"{method}-out"), checkpoint, method)
    return oracle_logits(load_oracle(folder), TOKENS)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / (want.max() - want.min()))


@pytest.mark.parametrize("overrides", [[PACKED], [UNPACKED]], ids=["packed", "unpacked"])
def test_every_path_is_inside_the_gate(checkpoint: Checkpoint, wanted: torch.Tensor, overrides: list[str]) -> None:
    engine = build(checkpoint.folder, *overrides)
    (reference,) = logits_by_chunks(engine, [TOKENS], PATHS["whole prompt"])
    assert distance(reference, wanted) <= LIMIT
    for chunks in PATHS.values():
        together = logits_by_chunks(engine, [TOKENS, TOKENS[:17], TOKENS[5:40]], chunks)
        assert torch.equal(together[0], reference)


PLAIN_OPS = [f"engine.backends.{op}=torch" for op in ("grouped_swiglu", "grouped_swiglu_packed")]


def test_experts_give_the_same_bits_packed_or_not(checkpoint: Checkpoint) -> None:
    backends = [*PLAIN_OPS, "engine.backends.experts=parts"]
    (kept,) = logits_by_chunks(build(checkpoint.folder, *backends, PACKED), [TOKENS], [64])
    (unpacked,) = logits_by_chunks(build(checkpoint.folder, *backends, UNPACKED), [TOKENS], [64])
    assert torch.equal(kept, unpacked)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rows_bits_do_not_depend_on_how_many_ranks_share_the_experts(checkpoint: Checkpoint, world_size: int) -> None:
    sampled = {"temperature": 1.0, "seed": 7}
    busy = [[(str(rank), TOKENS[rank : rank + 9], 5, sampled)] for rank in range(world_size - 1)]
    results = run_world(
        checkpoint.folder, [*busy, [("a", TOKENS, 4, sampled)]], PACKED, num_experts=8, hidden=SHAPE["hidden_size"],
        dispatcher="fabric",
    )  # fmt: skip
    engine = build(checkpoint.folder, PACKED)
    alone = record_logits(engine)
    run(engine, [request("a", TOKENS, 4, Sampling(temperature=1.0, seed=7))])
    assert len(alone) == 4 and results[-1].logits == alone


Fault = Callable[[Tensors], Tensors]
CONTROLS: list[tuple[str, Fault]] = [
    ("fp8", turn_scale_blocks),
    ("fp8", roll_scales),
    ("int4", swap_nibbles),
    ("int4", flip_signs_of_zero_point),
    ("int4", roll_scales),
    ("mxfp4", swap_nibbles),
    ("mxfp4", flip_signs_of_zero_point),
    ("mxfp4", roll_scales),
]


@pytest.mark.parametrize("method", GATED, indirect=True)
def test_faults_of_the_layout_move_the_logits_by_ten_times_the_limit(
    checkpoint: Checkpoint, wanted: torch.Tensor, method: str, tmp_path: Path
) -> None:
    faults = [fault for name, fault in CONTROLS if name == method]
    assert len(faults) >= 2
    for fault in faults:
        broken = Checkpoint(tmp_path / fault.__name__, checkpoint.config, fault(checkpoint.tensors)).single()
        moved = distance(logits_by_chunks(build(broken, PACKED), [TOKENS], [64])[0], wanted)
        print(f"{method}: {fault.__name__} moved the logits by {moved:.4f} of their range")
        assert moved >= 10 * LIMIT


def test_an_fp8_checkpoint_is_what_the_official_class_reads_by_itself(original: Path, tmp_path: Path) -> None:
    """No reading of ours on either side of this gate."""
    folder = packed(tmp_path, original, "fp8-whole").single()
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=METHODS["fp8-whole"].config["weight_block_size"])
    oracle = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    oracle.train(False)
    for kept in (PACKED, UNPACKED):
        (got,) = logits_by_chunks(build(folder, kept), [TOKENS], [64])
        assert distance(got, oracle_logits(oracle, TOKENS)) <= LIMIT
