"""From files to a rank's weights: every layout gives the same bits, and a rank reads what is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensor_files import Checkpoint, ShareOfExperts, load, weights_of

from pegahpc.checkpoint import intake
from pegahpc.checkpoint.files import CheckpointError
from pegahpc.checkpoint.reading import Job, read_all

LAYER = "model.layers.1."


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read, in order."""
    names: list[str] = []

    def spy(jobs: list[Job], progress: Callable[[float], None]) -> None:
        for source in (source for job in jobs for source in job.sources):
            is_whole = source.num_rows == source.info.shape[0]
            part = "" if is_whole else f"[{source.first_row}:{source.first_row + source.num_rows}]"
            names.append(source.name + part)
        read_all(jobs, progress)

    monkeypatch.setattr(intake, "read_all", spy)
    return names


def test_one_file_and_shards_and_fused_experts_give_the_same_bits(original: Path, checkpoint: Checkpoint) -> None:
    want = weights_of(load(original))
    assert_same(weights_of(load(checkpoint.single())), want)
    (checkpoint.folder / "model.safetensors").unlink()
    assert_same(weights_of(load(checkpoint.sharded(4))), want)
    checkpoint.fuse_experts()
    checkpoint.folder /= "fused"
    assert_same(weights_of(load(checkpoint.sharded(2))), want)


def test_weights_stand_where_their_names_say(checkpoint: Checkpoint) -> None:
    held, stored = weights_of(load(checkpoint.single())), checkpoint.tensors
    assert torch.equal(held["embed"], stored["model.embed_tokens.weight"])
    assert torch.equal(held["head"], stored["lm_head.weight"].T)
    assert torch.equal(held["1.ffn.bias_E"], stored[LAYER + "mlp.gate.e_score_correction_bias"])
    for expert in range(8):
        gate, up, down = (stored[f"{LAYER}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(held["1.ffn.gate_up_EHW"][expert], torch.cat((gate.T, up.T), dim=1))
        assert torch.equal(held["1.ffn.down_EWH"][expert], down.T)
    kv_b = stored[LAYER + "self_attn.kv_b_proj.weight"].view(4, 16 + 12, 24)
    for head in range(4):
        assert torch.equal(held["1.attention.w_uk_NPC"][head], kv_b[head, :16])
        assert torch.equal(held["1.attention.w_uv_NCV"][head], kv_b[head, 16:].T)


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 4), (6, 2), (7, 1)])
def test_a_rank_reads_and_holds_its_own_experts_only(
    checkpoint: Checkpoint, read: list[str], first: int, count: int, fused: bool
) -> None:
    if fused:
        checkpoint.fuse_experts()
    whole = weights_of(load(checkpoint.single()))
    read.clear()
    part = weights_of(load(checkpoint.folder, ShareOfExperts(first, count)))
    for name, tensor in whole.items():
        own = tensor[first : first + count] if name.endswith(("gate_up_EHW", "down_EWH")) else tensor
        assert torch.equal(part[name], own), name
    of_experts = [name.split("mlp.experts.")[1] for name in read if "mlp.experts." in name]
    if fused:
        assert {name.split("[")[1] for name in of_experts} == {f"{first}:{first + count}]"}
    else:
        assert {int(name.split(".")[0]) for name in of_experts} == set(range(first, first + count))
    assert len(read) == len(set(read)), "a tensor was read twice"


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
@pytest.mark.parametrize(("first", "count"), [(0, 8), (5, 3), (7, 1)])
def test_progress_rises_to_exactly_one(checkpoint: Checkpoint, first: int, count: int, fused: bool) -> None:
    if fused:
        checkpoint.fuse_experts()
    progress: list[float] = []
    load(checkpoint.single(), ShareOfExperts(first, count), progress)
    assert progress == sorted(progress) and 0 < progress[0] < 0.5 and progress[-1] == 1.0


def test_the_router_stays_float32_in_a_bfloat16_engine(checkpoint: Checkpoint) -> None:
    held = weights_of(load(checkpoint.single(), dtype=torch.bfloat16))
    wide = {name for name, tensor in held.items() if tensor.dtype == torch.float32}
    assert wide == {f"{layer}.ffn.{name}" for layer in (1, 2) for name in ("gate_HE", "bias_E")}
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in held.items() if name not in wide)


def test_layers_for_multi_token_prediction_are_not_read(checkpoint: Checkpoint, read: list[str]) -> None:
    checkpoint.config["num_nextn_predict_layers"] = 1
    checkpoint.tensors |= {name.replace("layers.1.", "layers.3."): tensor.clone()
                           for name, tensor in checkpoint.tensors.items() if "layers.1." in name}  # fmt: skip
    checkpoint.tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    assert len(load(checkpoint.single()).layers) == 3
    assert read and not any("layers.3." in name for name in read)


def test_a_tied_head_that_is_stored_all_the_same_is_not_read(checkpoint: Checkpoint, read: list[str]) -> None:
    checkpoint.config["tie_word_embeddings"] = True
    held = weights_of(load(checkpoint.single()))
    assert "lm_head.weight" in checkpoint.tensors and "lm_head.weight" not in read
    assert torch.equal(held["head"], held["embed"].T)


def test_a_wrappers_other_towers_are_left_alone(checkpoint: Checkpoint, original: Path) -> None:
    want = weights_of(load(original))
    checkpoint.config = {"model_type": "kimi_k25", "text_config": checkpoint.config, "vision_config": {"depth": 2}}
    checkpoint.tensors = {f"language_model.{name}": tensor for name, tensor in checkpoint.tensors.items()}
    checkpoint.tensors["vision_tower.patch_embed.weight"] = torch.full((3, 3), float("nan"))
    assert_same(weights_of(load(checkpoint.single())), want)


def test_old_rotary_buffers_are_left_alone(checkpoint: Checkpoint) -> None:
    checkpoint.tensors[LAYER + "self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load(checkpoint.single())


def test_nothing_is_read_before_the_check(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    del checkpoint.tensors["model.norm.weight"]
    monkeypatch.setattr(intake, "read_all", lambda *args: pytest.fail("a file was opened for its weights"))
    with pytest.raises(CheckpointError):
        load(checkpoint.single())
