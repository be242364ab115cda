"""How a checkpoint is read: in the disk's order, each byte once, in bounded memory; what goes wrong is told."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from packed_checkpoints import packed
from tensor_files import Checkpoint, ShareOfExperts, load, spec_of, weights_of

from pegahpc.checkpoint import reading
from pegahpc.checkpoint.files import CheckpointError, read_headers
from pegahpc.checkpoint.manifest import check

Span = tuple[int, int]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Span]]:
    """What is read of each file, by its inode, in order; by one thread, so that there is one order."""
    found: dict[int, list[Span]] = {}
    preadv = os.preadv

    def spy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        found.setdefault(os.fstat(descriptor).st_ino, []).append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", spy)
    monkeypatch.setattr(reading, "MAX_THREADS", 1)
    return found


@pytest.mark.parametrize("chunk_bytes", [1 << 24, 1000])
def test_each_file_is_read_from_its_start_to_its_end_and_no_byte_twice(
    checkpoint: Checkpoint, spans: dict[int, list[Span]], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
    load(checkpoint.sharded())
    assert len(spans) == 3
    for found in spans.values():
        assert found == sorted(found)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
    wanted = check(spec_of(checkpoint.folder), read_headers(checkpoint.folder))
    assert sum(end - begin for found in spans.values() for begin, end in found) == sum(t.num_bytes for t in wanted)


def test_of_experts_a_rank_reads_its_own_bytes_only(checkpoint: Checkpoint, spans: dict[int, list[Span]]) -> None:
    load(checkpoint.sharded(), ShareOfExperts(2, 2))
    wanted = check(spec_of(checkpoint.folder), read_headers(checkpoint.folder))
    kept = [tensor for tensor in wanted if tensor.expert is None or tensor.expert in range(2, 4)]
    assert sum(end - begin for found in spans.values() for begin, end in found) == sum(t.num_bytes for t in kept)


@pytest.mark.parametrize("method", ["plain", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("fused", [False, True])
def test_small_chunks_give_the_same_weights(
    original: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fused: bool
) -> None:
    """Chunks that end inside matrices, heads, stacks and blocks of scales."""
    if fused and method != "plain":
        return
    source = checkpoint if method == "plain" else packed(tmp_path / "packed", original, method)
    if fused:
        source.fuse_experts()
    want = weights_of(load(source.single()))
    for chunk_bytes in (300, 5000):
        monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
        got = weights_of(load(source.folder))
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_a_file_that_shrinks_after_the_check_is_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint.sharded()
    file = folder / "model-00002-of-00003.safetensors"
    opened = reading._open

    def shrink(path: Path, stack: object) -> int:
        if path == file:
            os.truncate(file, file.stat().st_size // 2)
        return opened(path, stack)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "_open", shrink)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    lines = str(error.value).splitlines()
    assert lines and all(str(file) in line or line.startswith("... and") for line in lines)
    assert "before its header says; is the file whole?" in lines[0]


def test_an_error_of_the_disk_is_told_with_the_file(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read at byte \d+ \(Input/output error\)"):
        load(checkpoint.single())


def test_a_fault_of_ours_in_a_reading_thread_is_raised_and_ends_all(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(reading, "_read_at", broken)
    with pytest.raises(ZeroDivisionError):
        load(checkpoint.single())


def test_weights_that_are_not_finite_are_told_together_and_not_without_end(checkpoint: Checkpoint) -> None:
    names = sorted(name for name in checkpoint.tensors if "experts" in name)[:3]
    for name in names:
        checkpoint.tensors[name][0, 0] = float("nan")
    with pytest.raises(CheckpointError) as error:
        load(checkpoint.single())
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == names
    for tensor in checkpoint.tensors.values():
        tensor.fill_(float("inf"))
    with pytest.raises(CheckpointError) as error:
        load(checkpoint.single())
    assert 10 <= len(str(error.value).splitlines()) <= 11


@pytest.mark.parametrize("packed_experts", [True, False])
def test_a_decoder_that_is_dropped_is_gone_at_once(original: Path, tmp_path: Path, packed_experts: bool) -> None:
    """Nothing of a load refers to itself: large weights do not wait for a collector."""
    folder = packed(tmp_path, original, "int4").single()
    gc.collect()
    gc.disable()
    try:
        decoder = load(folder, packed_experts=packed_experts)
        held = [weakref.ref(tensor) for tensor in weights_of(decoder).values()]
        del decoder
        assert len(held) > 20 and all(tensor() is None for tensor in held)
    finally:
        gc.enable()


PEAK = """
import sys
sys.path[:0] = [sys.argv[2]]
import torch
from pathlib import Path
from pegahpc.checkpoint import reading
from tensor_files import load

def high_water():  # of this process alone: ru_maxrss starts with its parent's
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

reading.CHUNK_BYTES = 1 << 20
Path("/proc/self/clear_refs").write_text("5")
before = high_water()
load(Path(sys.argv[1]), dtype=torch.bfloat16)
print(high_water() - before)
"""


@pytest.mark.slow
def test_a_load_holds_the_model_once(checkpoint: Checkpoint) -> None:
    """96 MiB of embeddings and head beside the rest: the peak is the model and a few chunks, no second copy."""
    wide = 96 * 1024
    checkpoint.config["vocab_size"] = wide * 4
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        checkpoint.tensors[name] = torch.ones(wide * 4, 64, dtype=torch.bfloat16)
    held = sum(tensor.numel() * 2 for tensor in checkpoint.tensors.values())
    support = Path(__file__).parents[1] / "support"
    command = [sys.executable, "-c", PEAK, str(checkpoint.single()), str(support)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    peak = int(run.stdout.splitlines()[-1]) * 1024
    assert held > 96 << 20 and 0.9 * held < peak < 1.3 * held
