"""A checkpoint with faults: each named with its tensor and its file, several together."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tensor_files import Checkpoint, load

from pegahpc.checkpoint.files import CheckpointError
from pegahpc.models.fields import UnsupportedModel

NORM = "model.layers.2.input_layernorm.weight"


def fault_of(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as error:
        load(checkpoint.folder)
    return str(error.value)


def shard_of(checkpoint: Checkpoint, name: str) -> str:
    return f"model-{sorted(checkpoint.tensors).index(name) % 3 + 1:05}-of-00003.safetensors"


def test_a_missing_tensor_is_named_with_its_shape(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors[NORM]
    checkpoint.sharded()
    assert fault_of(checkpoint) == f"{NORM}: is missing from the checkpoint (expected shape [64])"


def test_a_wrong_shape_is_named_with_its_file(checkpoint: Checkpoint) -> None:
    checkpoint.tensors[NORM] = torch.ones(63)
    checkpoint.sharded()
    assert fault_of(checkpoint) == f"{NORM}: has shape [63], config.json says [64] ({shard_of(checkpoint, NORM)})"


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_a_wrong_type_is_named_with_its_file(checkpoint: Checkpoint, dtype: torch.dtype, name: str) -> None:
    checkpoint.tensors[NORM] = checkpoint.tensors[NORM].to(dtype)
    checkpoint.sharded()
    want = f"{NORM}: has type {name}, not one of F32, BF16, F16 ({shard_of(checkpoint, NORM)})"
    assert fault_of(checkpoint) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    checkpoint.tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    assert torch.equal(load(checkpoint.single()).embed_VH, checkpoint.tensors["model.embed_tokens.weight"].float())


def test_a_tensor_that_the_line_does_not_know_is_named(checkpoint: Checkpoint) -> None:
    checkpoint.tensors["model.layers.2.self_attn.q_norm.weight"] = torch.ones(3)
    checkpoint.single()
    assert fault_of(checkpoint) == "model.layers.2.self_attn.q_norm.weight: this line (deepseek_v3) has no such tensor"


def test_a_layer_beyond_the_last_is_unknown_unless_it_predicts(checkpoint: Checkpoint) -> None:
    checkpoint.tensors["model.layers.3.input_layernorm.weight"] = torch.ones(64)
    checkpoint.single()
    assert "model.layers.3.input_layernorm.weight: this line (deepseek_v3) has no such tensor" in fault_of(checkpoint)


def test_an_expert_too_many_and_one_too_few_are_named(checkpoint: Checkpoint) -> None:
    before = "model.layers.1.mlp.experts."
    checkpoint.tensors[f"{before}8.up_proj.weight"] = checkpoint.tensors.pop(f"{before}7.up_proj.weight")
    checkpoint.single()
    assert fault_of(checkpoint).splitlines() == [
        f"{before}7.up_proj.weight: is missing from the checkpoint (expected shape [32, 64])",
        f"{before}8.up_proj.weight: this line (deepseek_v3) has no such tensor",
    ]


def test_a_stack_of_too_few_experts_is_named(checkpoint: Checkpoint) -> None:
    checkpoint.fuse_experts()
    name = "model.layers.1.mlp.experts.down_proj"
    checkpoint.tensors[name] = checkpoint.tensors[name][:7]
    checkpoint.single()
    assert fault_of(checkpoint) == f"{name}: has shape [7, 64, 32], config.json says [8, 64, 32] (model.safetensors)"


def test_several_faults_are_reported_together(checkpoint: Checkpoint) -> None:
    del checkpoint.tensors["model.norm.weight"]
    checkpoint.tensors[NORM] = torch.ones(2, dtype=torch.int32)
    checkpoint.tensors["surprise"] = torch.ones(1)
    checkpoint.sharded()
    lines = fault_of(checkpoint).splitlines()
    assert [line.split(":")[0] for line in lines] == ["model.norm.weight", NORM, NORM, "surprise"]


def test_many_faults_are_counted(checkpoint: Checkpoint) -> None:
    for name in [name for name in checkpoint.tensors if "experts" in name][:25]:
        del checkpoint.tensors[name]
    checkpoint.single()
    lines = fault_of(checkpoint).splitlines()
    assert len(lines) == 11 and lines[-1] == "... and 15 more"


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_that_was_cut_short_is_named(checkpoint: Checkpoint, keep: int) -> None:
    checkpoint.sharded()
    shard = checkpoint.folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert re.fullmatch(rf"{re.escape(str(shard))}: cannot be read \(.*\); is the file whole\?", fault_of(checkpoint))


def test_shards_that_are_missing_are_named_together(checkpoint: Checkpoint) -> None:
    checkpoint.sharded()
    for shard in (1, 3):
        (checkpoint.folder / f"model-{shard:05}-of-00003.safetensors").unlink()
    lines = fault_of(checkpoint).splitlines()
    assert len(lines) == 2 and "model-00001-of-00003.safetensors: cannot be read" in lines[0]
    assert "model-00003-of-00003.safetensors: cannot be read" in lines[1]


def test_an_index_that_names_another_shard_is_found_out(checkpoint: Checkpoint) -> None:
    checkpoint.sharded()
    placed = {name: shard_of(checkpoint, name) for name in checkpoint.tensors}
    wrong = next(file for file in sorted(set(placed.values())) if file != placed[NORM])
    checkpoint.write_index(placed | {NORM: wrong})
    assert fault_of(checkpoint) == f"{checkpoint.folder / wrong}: has no tensor {NORM!r}, which model.safetensors.index.json puts there"  # fmt: skip  # noqa: E501


def test_of_two_shards_that_hold_one_name_the_index_decides(checkpoint: Checkpoint) -> None:
    checkpoint.single()
    (checkpoint.folder / "model.safetensors").rename(checkpoint.folder / "a.safetensors")
    names = list(checkpoint.tensors)
    checkpoint.tensors = {NORM: torch.full((64,), 7.0), "model.norm.weight": torch.full((64,), 5.0)}
    checkpoint.single()
    checkpoint.write_index(dict.fromkeys(names, "a.safetensors") | {"model.norm.weight": "model.safetensors"})
    decoder = load(checkpoint.folder)
    assert set(decoder.final_norm_H.tolist()) == {5.0}
    assert set(decoder.layers[2].input_norm_H.tolist()) != {7.0}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "\x00"])
def test_a_damaged_index_is_named(checkpoint: Checkpoint, text: str) -> None:
    checkpoint.sharded()
    (checkpoint.folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json: is no safetensors index" in fault_of(checkpoint)


def test_a_folder_without_weights_is_named(checkpoint: Checkpoint) -> None:
    (checkpoint.single() / "model.safetensors").unlink()
    assert (
        fault_of(checkpoint) == f"{checkpoint.folder}: has neither model.safetensors.index.json nor model.safetensors"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [NORM, "model.layers.1.mlp.experts.5.up_proj.weight", "lm_head.weight",
                                  "model.layers.2.mlp.gate.e_score_correction_bias"])  # fmt: skip
def test_a_weight_that_is_not_finite_is_named_with_its_file(checkpoint: Checkpoint, name: str, value: float) -> None:
    checkpoint.tensors[name].view(-1)[-1] = value
    checkpoint.sharded()
    assert fault_of(checkpoint) == f"{name}: holds values that are not finite ({shard_of(checkpoint, name)})"


def test_a_config_that_asks_for_far_more_than_there_is_is_refused_before_a_list_of_it_is_made(
    checkpoint: Checkpoint,
) -> None:
    checkpoint.single()
    config = json.loads((checkpoint.folder / "config.json").read_text())
    for change in ({"num_hidden_layers": 9_000}, {"n_routed_experts": 10_000_000, "n_group": 1, "topk_group": 1}):
        (checkpoint.folder / "config.json").write_text(json.dumps(config | change))
        assert re.search(
            r"config.json says .* layers and .* experts; the checkpoint has only \d+ tensors", fault_of(checkpoint)
        )
    (checkpoint.folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(UnsupportedModel, match="num_hidden_layers is 1000000000, above 10000"):
        load(checkpoint.folder)


def test_an_index_that_leads_out_of_its_folder_is_refused(checkpoint: Checkpoint) -> None:
    checkpoint.sharded()
    index = checkpoint.folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"][NORM] = "../../etc/passwd"
    index.write_text(json.dumps(document))
    assert "names the file '../../etc/passwd', which is not one of its own folder" in fault_of(checkpoint)
