"""Plans of the published models, from config.json alone, against the figures of the systems that have run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracles import ASSETS, save_tiny
from packed_checkpoints import METHODS, packed
from tensor_files import ShareOfExperts, load, spec_of

from pegahpc.cache_layout import cache_layout
from pegahpc.checkpoint.intake import Intake
from pegahpc.config import ConfigError, compose_fleet
from pegahpc.plan import Plan, resolve

GIB = 2**30
MODELS = ("glm52", "k3", "kimi_k2", "deepseek_v3", "deepseek_v2_lite")


def plan_of(*overrides: str) -> Plan:
    return resolve(compose_fleet(overrides), is_plan_only=True)


@pytest.mark.parametrize(
    ("model", "ep_size", "num_tensors", "gib"),
    [("glm52", 4, 30_660, 188.0), ("glm52", 8, 16_260, 103.6), ("k3", 16, None, 189.9), ("kimi_k2", 8, None, 88.3)],
)
def test_a_rank_holds_what_the_original_systems_have_counted(
    model: str, ep_size: int, num_tensors: int | None, gib: float
) -> None:
    plan = plan_of(f"model={model}", f"topology=ep{ep_size}")
    assert round(plan.weights_bytes_per_rank / GIB, 1) == gib
    assert num_tensors in (None, plan.num_tensors_per_rank)
    assert (plan.fits, plan.has_weights, plan.is_device_assumed) == (True, False, True)
    own = next(width for width in plan.widths if width.ep_size == ep_size)
    assert own.weights_bytes_per_rank == plan.weights_bytes_per_rank and own.max_pages == plan.max_pages


def test_the_page_of_glm_5_2_has_the_original_systems_stride() -> None:
    """79 layers of 64 rows of 656 bytes, 22 of 64 index keys of 132, rounded up to a whole row."""
    plan = plan_of("model=glm52", "topology=ep4")
    assert plan.page_stride_bytes == 3_503_040 == 656 * 5340
    assert plan.cache_bytes_per_token == 79 * 656 + 22 * 132 == 54_728
    assert [(group.name, group.num_layers, group.layer_bytes) for group in plan.cache_groups] == [
        ("latent", 79, 656), ("index_key", 22, 132)]  # fmt: skip


def test_plain_rows_of_glm_5_2_are_of_the_engines_type_and_of_the_layers_that_run() -> None:
    plan = plan_of("model=glm52", "topology=ep4", "engine.cache_format=plain")
    assert plan.cache_bytes_per_token == 78 * 576 * 2 + 21 * 128 * 2
    assert plan.page_stride_bytes == 64 * plan.cache_bytes_per_token


def test_k3_caches_24_latent_rows_a_token_and_a_state_a_request() -> None:
    plan = plan_of("model=k3", "topology=ep16")
    assert (plan.cache_bytes_per_token, plan.page_stride_bytes) == (27_648, 64 * 27_648)
    assert plan.state_bytes_per_slot == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 12288 * 2)
    assert plan.state_bytes == plan.state_bytes_per_slot * plan.fleet.engine.max_num_seqs


@pytest.mark.parametrize(("model", "num_layers"), [("kimi_k2", 61), ("deepseek_v3", 61), ("deepseek_v2_lite", 27)])
def test_latent_lines_cache_1152_bytes_a_layer_and_token(model: str, num_layers: int) -> None:
    plan = plan_of(f"model={model}", "topology=ep8")
    assert plan.cache_bytes_per_token == num_layers * 1152
    assert (plan.state_bytes_per_slot, plan.unserved) == (0, "")


def test_pages_are_what_a_device_has_left() -> None:
    """By hand: 140 GiB, less 8 in reserve, less what an EP8 rank holds."""
    plan = plan_of("model=glm52", "topology=ep8", "cluster.device_memory_gib=140")
    assert plan.max_pages == (140 * GIB - 8 * GIB - plan.held_bytes_per_rank) // 3_503_040
    assert plan.device_bytes == 140 * GIB and not plan.is_device_assumed
    half = plan_of("model=k3", "topology=ep16", "cluster.device_memory_gib=210", "engine.max_num_seqs=8")
    assert half.max_pages is not None
    assert half.max_pages == (202 * GIB - half.held_bytes_per_rank - 8 * half.state_bytes_per_slot) // (64 * 27_648)


def test_an_engine_holds_projections_unpacked_and_routers_in_float32() -> None:
    """By hand for GLM-5.2 at EP4: what is packed and no expert doubles, less its scales; routers double."""
    plan = plan_of("model=glm52", "topology=ep4")
    attention = 2048 * 6144 + 16384 * 2048 + 576 * 6144 + 28672 * 512 + 6144 * 16384
    indexer, shared, dense = 4096 * 2048 + 128 * 6144, 3 * 6144 * 2048, 3 * 6144 * 12288
    codes = 78 * attention + 21 * indexer + 75 * shared + 3 * dense
    blocks = 78 * (16 * 48 + 128 * 16 + 5 * 48 + 224 * 4 + 48 * 128) + 21 * (32 * 16 + 48) + 75 * 3 * 48 * 16
    blocks += 3 * 3 * 48 * 96
    change = codes - 4 * blocks + 75 * 256 * 6144 * 2
    assert plan.held_bytes_per_rank - plan.weights_bytes_per_rank == change
    unpacked = plan_of("model=glm52", "topology=ep4", "engine.packed_experts=false")
    assert unpacked.held_bytes_per_rank - plan.held_bytes_per_rank == 75 * 64 * 3 * (2048 * 6144 - 16 * 48 * 4)


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (("model=glm52", "topology=ep4", "cluster.device_memory_gib=140"), "topology=ep8 with engine.cache_tokens="),
        (("model=glm52", "topology=ep4", "cluster.device_memory_gib=142"), "topology=ep8 would fit"),
        (("model=glm52", "topology=ep8", "engine.cache_tokens=9000000"), "engine.cache_tokens=2948032 would fit"),
        (("model=k3", "topology=ep8"), "topology=ep16 would fit"),
        (("model=k3", "topology=ep8", "cluster.device_memory_gib=80"), "no topology would: even the widest"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_what_would(overrides: tuple[str, ...], advice: str) -> None:
    plan = plan_of(*overrides)
    assert plan.fits is False and advice in plan.advice
    if "topology=ep" in plan.advice and "with" not in plan.advice:
        fitting = plan.advice.split("topology=")[1].split()[0]
        others = [override for override in overrides if not override.startswith("topology")]
        assert plan_of(*others, f"topology={fitting}").fits is True


@pytest.mark.parametrize("model", MODELS)
def test_a_model_without_weights_is_planned_and_not_served(model: str) -> None:
    fleet = compose_fleet([f"model={model}", "topology=ep8"])
    plan = resolve(fleet, is_plan_only=True)
    assert plan.line == spec_of(ASSETS / "configs" / model).line and len(plan.fingerprint) == 32
    assert resolve(plan.fleet, is_plan_only=True) == plan, "an auto and its decision are one configuration"
    with pytest.raises(ConfigError, match=r"^model.path: .*; set model.path to the folder of the weights"):
        resolve(fleet)


def test_rows_of_fp8_are_refused_for_a_line_without_an_indexer() -> None:
    with pytest.raises(ConfigError, match=r"^engine.cache_format: fp8 rows are those of lines with an indexer, not of"):
        plan_of("model=kimi_k2", "topology=ep8", "engine.cache_format=fp8")
    with pytest.raises(ConfigError, match=r"^engine.cache_format: 'int3' is none of auto, plain, fp8"):
        plan_of("model=glm52", "engine.cache_format=int3")


@pytest.mark.parametrize(("value", "says"), [("0", "is below 0.1 GiB"), ("much", "could not be converted")])
def test_a_device_without_memory_is_refused(value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^cluster.device_memory_gib: .*{says}"):
        plan_of("model=glm52", f"cluster.device_memory_gib={value}")


def test_a_rank_of_cpus_has_its_part_of_the_machine() -> None:
    plan = plan_of("model=deepseek_v2_lite", "topology=ep2", "cluster.device=cpu", "cluster.device_memory_gib=120")
    assert plan.fleet.engine.dtype == "float32" and plan.reserve_bytes == 0
    own = plan.held_bytes_per_rank + plan.slab_bytes
    assert plan.max_pages == (60 * GIB - own) // plan.page_stride_bytes
    assert plan.fits is (2 * (own + plan.cache_bytes) <= 120 * GIB)


@pytest.mark.parametrize("packed_experts", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_packed_weights_are_counted_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, packed_experts: bool
) -> None:
    """Against every tensor that a load makes room for, as a rank of two."""
    held: list[int] = []
    new = Intake.new

    def spy(self: Intake, *shape: int, dtype: Any = None) -> Any:
        tensor = new(self, *shape, dtype=dtype)
        held.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Intake, "new", spy)
    checkpoint = packed(tmp_path / "packed", save_tiny(tmp_path / "plain", "v3-groups"), method)
    load(checkpoint.single(), ShareOfExperts(0, 4), packed_experts=packed_experts)
    given = ["model=checkpoint", f"model.path={checkpoint.folder}", "model.name=a", "model.max_model_len=512",
             "topology=ep2", "cluster.device=cpu", f"engine.packed_experts={packed_experts}"]  # fmt: skip
    plan = resolve(compose_fleet(given))
    assert plan.held_bytes_per_rank == sum(held)
    assert plan.weight_format == spec_of(checkpoint.folder).quantization.format.name  # type: ignore[union-attr]
    own = re.compile(r"(?!.*\.mlp\.experts\.[4-7]\.)")
    stored = [tensor.nbytes for name, tensor in checkpoint.tensors.items() if own.match(name)]
    assert (plan.num_tensors_per_rank, plan.weights_bytes_per_rank) == (len(stored), sum(stored))


def test_experts_stay_packed_on_gpus_and_on_cpus_only_where_unpacked_they_would_not_fit() -> None:
    def is_packed(*overrides: str) -> bool | None:
        return plan_of("model=kimi_k2", "topology=ep1", *overrides).fleet.engine.packed_experts

    assert is_packed() is True
    on_cpu = ("cluster.device=cpu", "engine.dtype=bfloat16")
    assert is_packed(*on_cpu, "cluster.device_memory_gib=4000") is False
    assert is_packed(*on_cpu, "cluster.device_memory_gib=700") is True
    assert is_packed(*on_cpu, "cluster.device_memory_gib=4000", "engine.packed_experts=true") is True
    assert is_packed(*on_cpu, "cluster.device_memory_gib=700", "engine.packed_experts=false") is False


def test_the_layout_follows_the_layers_that_there_are() -> None:
    spec = spec_of(ASSETS / "tiny-moe")
    assert cache_layout(spec, "float32", 16).page_stride_bytes == 6 * 16 * (64 + 16) * 4
    assert cache_layout(spec, "bfloat16", 1).bytes_per_token == 6 * 80 * 2


def pegahpc(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pegahpc.launch.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_prints_one_document_or_a_report_and_says_by_its_status_whether_it_fits() -> None:
    ran = pegahpc("plan", "--json", "model=glm52", "topology=ep4")
    document = json.loads(ran.stdout)
    wanted = {"num_tensors_per_rank": 30_660, "page_stride_bytes": 3_503_040, "cache_bytes_per_token": 54_728,
              "state_bytes_per_slot": 0, "fits": True}  # fmt: skip
    assert ran.returncode == 0 and {key: document[key] for key in wanted} == wanted
    assert round(document["weights_bytes_per_rank"] / GIB, 1) == 188.0 and document["max_pages"] > 4096
    ran = pegahpc("plan", "model=k3", "topology=ep8")
    assert ran.returncode == 1 and "does not fit; topology=ep16 would fit" in ran.stdout
    assert "274.1 GiB" in ran.stdout and "27,648 B" in ran.stdout and "cannot be served yet" in ran.stdout
