"""What a configuration resolves to: autos decided, memory counted, impossible things refused by their key."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from engines import build
from oracles import TINY, TINY_MOE, save_tiny
from tensor_files import ShareOfExperts, load, weights_of

from pegahpc.config import BackendsConfig, ConfigError, FleetConfig, compose_fleet
from pegahpc.kernels.selected import Kernels
from pegahpc.plan import Plan, resolve


def composed(folder: Path, *overrides: str, ep_size: int = 1) -> FleetConfig:
    given = ["model=checkpoint", f"model.path={folder}", "model.name=test", "model.max_model_len=512",
             f"topology=ep{ep_size}", "cluster.device=cpu"]  # fmt: skip
    return compose_fleet([*given, *overrides])


def plan_of(folder: Path, *overrides: str, ep_size: int = 1) -> Plan:
    return resolve(composed(folder, *overrides, ep_size=ep_size))


def refusal_of(folder: Path, *overrides: str, ep_size: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        plan_of(folder, *overrides, ep_size=ep_size)
    return str(error.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


def test_every_kernel_may_be_pinned_in_the_configuration() -> None:
    assert [field.name for field in fields(BackendsConfig)] == sorted(Kernels.__dataclass_fields__)


@pytest.mark.parametrize(("ep_size", "dispatcher"), [(1, "local"), (2, "fabric")])
def test_every_auto_is_decided(folder: Path, ep_size: int, dispatcher: str) -> None:
    engine = plan_of(folder, ep_size=ep_size).fleet.engine
    assert (engine.dispatcher, engine.dtype, engine.row_invariant) == (dispatcher, "float32", True)
    assert (engine.idle_wait_ms, engine.num_threads) == (100.0, 1)
    assert all(value is not None and value != "auto" for value in vars(engine).values())


def test_what_the_user_decided_stays(folder: Path) -> None:
    given = ("engine.dtype=bfloat16", "engine.row_invariant=false", "engine.idle_wait_ms=7", "engine.num_threads=2",
             "engine.dispatcher=torch")  # fmt: skip
    engine = plan_of(folder, *given).fleet.engine
    assert (engine.dtype, engine.row_invariant, engine.idle_wait_ms) == ("bfloat16", False, 7.0)
    assert (engine.num_threads, engine.dispatcher) == (2, "torch")


def test_resolving_leaves_its_input_alone_and_resolving_again_changes_nothing(folder: Path) -> None:
    fleet = composed(folder)
    plan = resolve(fleet)
    assert fleet == composed(folder)
    assert resolve(plan.fleet) == plan


def bytes_held(weights: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_weights_are_counted_to_the_byte(tmp_path: Path, name: str, dtype: str) -> None:
    save_tiny(tmp_path, name)
    for ep_size in (1, 2, 8):
        share = ShareOfExperts(0, 8 // ep_size)
        held = bytes_held(weights_of(load(tmp_path, share, dtype=getattr(torch, dtype))))
        assert plan_of(tmp_path, f"engine.dtype={dtype}", ep_size=ep_size).held_bytes_per_rank == held


def test_the_shipped_models_weights_are_counted_to_the_byte() -> None:
    held = bytes_held(weights_of(load(TINY_MOE, ShareOfExperts(0, 16))))
    assert plan_of(TINY_MOE).held_bytes_per_rank == held


def test_the_cache_is_what_an_engine_allocates(folder: Path) -> None:
    overrides = ("engine.page_tokens=16", "engine.cache_tokens=1000")
    plan, engine = plan_of(folder, *overrides), build(folder, *overrides)
    slab = engine.runner.slab
    assert plan.cache_bytes == slab.numel() * slab.element_size()
    assert plan.num_pages == slab.shape[0] == 63  # 1000 // 16 and the padding page
    assert plan.page_stride_bytes == slab.stride(0) * slab.element_size() == 3 * 16 * (24 + 8) * 4
    assert plan.cache_bytes_per_token == 3 * (24 + 8) * 4


@pytest.mark.parametrize(("ep_size", "num_local"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_experts_are_shared_evenly(folder: Path, ep_size: int, num_local: int) -> None:
    plan = plan_of(folder, ep_size=ep_size)
    assert (plan.num_experts, plan.num_local_experts, plan.num_layers, plan.line) == (8, num_local, 3, "deepseek_v3")
    # 3 of a decoder, 2 norms and 7 of attention a layer, 3 of a dense FFN, gate, bias and shared of the MoE ones.
    assert plan.num_tensors_per_rank == 3 + 3 * (2 + 7) + 3 + 2 * (2 + 3 + 3 * num_local)


def test_ranks_that_do_not_divide_the_experts_are_told_what_fits(folder: Path) -> None:
    want = "topology.ep_size: 16 ranks do not divide 8 experts; use one of 1, 2, 4, 8"
    assert refusal_of(folder, ep_size=16) == want


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy with another config.json."""
    shutil.copytree(folder, to)
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_a_context_above_the_checkpoints_is_refused(folder: Path) -> None:
    assert plan_of(folder, "model.max_model_len=512").fleet.model.max_model_len == 512
    want = "model.max_model_len: 513 is above the checkpoint's max_position_embeddings 512"
    assert refusal_of(folder, "model.max_model_len=513") == want


def test_a_local_dispatcher_serves_one_rank(folder: Path) -> None:
    want = "engine.dispatcher: local serves one rank, the topology has 2; use auto"
    assert refusal_of(folder, "engine.dispatcher=local", ep_size=2) == want


def test_a_page_above_a_split_of_attention_is_refused(folder: Path) -> None:
    assert refusal_of(folder, "engine.page_tokens=512") == "engine.page_tokens: 512 is above 256"
    assert plan_of(folder, "engine.page_tokens=256").fleet.engine.page_tokens == 256


def test_more_memory_than_the_machine_has_is_refused_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(folder, ep_size=2)
    needed = 2 * (plan.held_bytes_per_rank + plan.cache_bytes + plan.slab_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=needed))
    assert plan_of(folder, ep_size=2).device_bytes == needed
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=needed - 1))
    assert refusal_of(folder, ep_size=2).startswith("engine.cache_tokens: 2 ranks need 0.0 GiB for weights, cache")


def test_a_cache_without_bounds_is_refused(folder: Path) -> None:
    message = refusal_of(folder, "engine.cache_tokens=100000000000")
    assert message.startswith("engine.cache_tokens: 1 ranks need 35762.8 GiB for weights, cache and slabs, the machine")
    assert "lower it or engine.max_rows_per_step, or use fewer ranks" in message


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("needs a machine without an NVIDIA device")
    assert refusal_of(folder, "cluster.device=cuda").startswith("cluster.device: 1 ranks want a GPU each")
    assert plan_of(folder, "cluster.device=auto").fleet.cluster.device == "cpu"


def test_a_checkpoint_that_cannot_be_served_is_a_fault_of_its_path(folder: Path, tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "nothing").startswith(f"model.path: {tmp_path}/nothing/config.json: ")
    llama = changed(folder, tmp_path / "llama", model_type="llama")
    assert refusal_of(llama).startswith("model.path: config.json: model_type is 'llama'")
    wide = changed(folder, tmp_path / "wide", hidden_size=65)
    assert "model.path: model.embed_tokens.weight: has shape [320, 64], config.json says [320, 65]" in refusal_of(wide)


def test_the_fingerprint_is_that_of_what_every_tray_must_share(folder: Path, tmp_path: Path) -> None:
    plain = plan_of(folder).fingerprint
    assert plan_of(folder).fingerprint == plain and len(plain) == 32
    decided = ("engine.dtype=float32", "engine.dispatcher=local", "engine.row_invariant=true")
    assert plan_of(folder, *decided).fingerprint == plain, "an auto and its decision are one configuration"
    others = [
        plan_of(folder, "engine.cache_tokens=8192"),
        plan_of(folder, "engine.dtype=bfloat16"),
        plan_of(folder, "engine.backends.rms_norm=torch"),
        plan_of(folder, "model.max_model_len=256"),
        plan_of(folder, ep_size=2),
    ]
    prints = {plain, *(other.fingerprint for other in others)}
    assert len(prints) == 6


def test_the_fingerprint_changes_with_the_models_own_configuration(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    first = plan_of(changed(folder, place)).fingerprint
    shutil.rmtree(place)
    assert plan_of(changed(folder, place)).fingerprint == first
    shutil.rmtree(place)
    assert plan_of(changed(folder, place, routed_scaling_factor=2.0)).fingerprint != first


def test_slabs_of_the_fabric_are_counted(folder: Path) -> None:
    """Three experts a row, hidden 64, float32: a window of 128 * 3 rows each way and peer."""
    assert plan_of(folder, "topology=ep4").slab_bytes == 4 * 2 * 128 * 3 * 64 * 4
    assert plan_of(folder, "topology=ep1").slab_bytes == 0
