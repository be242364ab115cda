"""Layers that run as one compiled call give the bits of those that are called one by one."""

from pathlib import Path

import pytest
import torch
from engines import build, logits_by_chunks
from oracles import TINY, TINY_MOE, save_tiny

from pegahpc.engine.loop import Engine
from pegahpc.kernels import native
from pegahpc.kernels.program import Program

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

PARTS = "engine.backends.program=parts"
SEQUENCES = [[3 + (7 * i + 11 * j) % 300 for j in range(count)] for i, count in enumerate((61, 17, 40))]


@pytest.fixture(scope="module", params=[*TINY, "tiny-moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return TINY_MOE if name == "tiny-moe" else save_tiny(tmp_path_factory.mktemp(name), name)


def new_engine(checkpoint: Path, *overrides: str) -> Engine:
    return build(checkpoint, *overrides, num_experts=16 if checkpoint == TINY_MOE else 8)


@pytest.mark.parametrize("chunks", [[64], [1], [13, 1], [11, 5, 1, 1, 8]], ids=str)
def test_one_call_for_all_layers_gives_the_bits_of_one_by_one(checkpoint: Path, chunks: list[int]) -> None:
    recorded, composed = new_engine(checkpoint), new_engine(checkpoint, PARTS)
    assert isinstance(recorded.runner.decoder._program, Program) and composed.runner.decoder._program is None
    for got, want in zip(
        *(logits_by_chunks(engine, SEQUENCES, chunks) for engine in (recorded, composed)), strict=True
    ):
        assert torch.equal(got, want)
    assert torch.equal(recorded.runner.slab, composed.runner.slab)
    assert recorded.expert_loads().layers == composed.expert_loads().layers


def test_buffers_grow_with_the_rows_and_a_step_without_rows_changes_nothing(checkpoint: Path) -> None:
    engine = new_engine(checkpoint)
    few = logits_by_chunks(engine, SEQUENCES[1:2], [2])
    logits_by_chunks(engine, SEQUENCES, [40])
    slab = engine.runner.slab.clone()
    engine.step()
    assert torch.equal(engine.runner.slab, slab)
    assert torch.equal(logits_by_chunks(engine, SEQUENCES[1:2], [2])[0], few[0])


@pytest.mark.parametrize(
    "choice", ["latent_project=parts", "experts=parts", "moe_output=parts", "rms_norm=torch", "latent_attention=torch"]
)
def test_a_part_that_is_not_compiled_is_called_layer_by_layer(checkpoint: Path, choice: str) -> None:
    engine = new_engine(checkpoint, f"engine.backends.{choice}")
    assert engine.runner.decoder._program is None
    got = logits_by_chunks(engine, SEQUENCES, [13, 1])
    want = logits_by_chunks(new_engine(checkpoint), SEQUENCES, [13, 1])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("override", ["engine.dtype=bfloat16", "engine.num_threads=2"])
def test_nothing_is_recorded_where_no_compiled_kernel_serves(override: str) -> None:
    assert new_engine(TINY_MOE, override).runner.decoder._program is None


def test_a_step_of_more_rows_than_slabs_and_buffers_hold_is_refused() -> None:
    engine = new_engine(TINY_MOE, "engine.max_rows_per_step=4", "engine.max_num_seqs=4")
    program = engine.runner.decoder._program
    assert program is not None
    rows = torch.zeros(6, engine.runner.decoder.embed_VH.shape[1])
    nothing = {"cis_TR": rows, "row_idx_T": rows, "slab": engine.runner.slab, "contexts": ()}
    with pytest.raises(AssertionError):
        program(rows, 6, **nothing)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        program(rows[:2], 4, **nothing)  # type: ignore[arg-type]
