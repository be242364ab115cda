"""The typed configuration. conf/*.yaml holds values, this file holds names, types, units and checks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

ROLES = ("mixed",)
CLUSTERS = ("local",)
DISPATCHERS = ("auto", "local", "torch", "fabric")
DTYPES = ("auto", "float32", "bfloat16")
CACHE_FORMATS = ("auto", "plain", "fp8")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@A-Z]+")  # as browsers send it: no path, no capitals
ASSETS = Path(__file__).parent / "assets"


class ConfigError(ValueError):
    """A value that the user set and can change. The message starts with the key's full path."""


def _at_least(key: str, value: float, bound: float, unit: str = "") -> None:
    if value < bound:
        raise ConfigError(f"{key}: {value}{unit} is below {bound}{unit}")


def _one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}: {value!r} is none of {', '.join(choices)}")


def check_fleet_name(name: str) -> None:
    """Refuse what is no name of a fleet; it becomes a folder's."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"fleet.name: {name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")


@dataclass(kw_only=True)
class LifeConfig:
    """`fleet.*`: the fleet's name, its home, and the bounds of its waits."""

    name: str = MISSING
    home: str = MISSING
    rendezvous_timeout_s: float = 120.0
    ready_timeout_s: float = 1800.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_fleet_name(self.name)
        self.home = str(Path(os.path.expanduser(self.home)).absolute())
        for key in ("rendezvous_timeout_s", "ready_timeout_s", "drain_timeout_s"):
            _at_least(f"fleet.{key}", getattr(self, key), 0.1, " s")


@dataclass(kw_only=True)
class ModelConfig:
    """`model.*`: which checkpoint, under what name, and how long a request may grow."""

    path: str = MISSING
    name: str = MISSING
    max_model_len: int = MISSING

    def __post_init__(self) -> None:
        self.path = str(Path(os.path.expanduser(self.path)).absolute())
        _at_least("model.max_model_len", self.max_model_len, 1, " tokens")


@dataclass(kw_only=True)
class TopologyConfig:
    """`topology.*`: how ranks are arranged. One rank is one device; one tray is one launched task."""

    num_trays: int = MISSING
    ranks_per_tray: int = MISSING
    ep_size: int = MISSING
    attention_tp: int = 1
    role: str = "mixed"

    def __post_init__(self) -> None:
        _at_least("topology.num_trays", self.num_trays, 1)
        _at_least("topology.ranks_per_tray", self.ranks_per_tray, 1)
        if self.ep_size != self.world_size:
            raise ConfigError(
                f"topology.ep_size: {self.ep_size} is not num_trays * ranks_per_tray ="
                f" {self.num_trays} * {self.ranks_per_tray} = {self.world_size}"
            )
        if self.attention_tp != 1:
            raise ConfigError(f"topology.attention_tp: {self.attention_tp} is not supported; use 1")
        _one_of("topology.role", self.role, ROLES)

    @property
    def world_size(self) -> int:
        """All ranks of the fleet."""
        return self.num_trays * self.ranks_per_tray


@dataclass(kw_only=True)
class ClusterConfig:
    """`cluster.*`: where tray processes run and which addresses they bind."""

    kind: str = "local"
    device: str = "auto"  # auto | cpu | cuda
    device_memory_gib: float | None = None  # of one GPU, or of the machine for ranks on CPUs; null: what is known
    interface: str = "lo"

    def __post_init__(self) -> None:
        _one_of("cluster.kind", self.kind, CLUSTERS)
        _one_of("cluster.device", self.device, ("auto", "cpu", "cuda"))
        if self.device_memory_gib is not None:
            _at_least("cluster.device_memory_gib", self.device_memory_gib, 0.1, " GiB")


@dataclass(kw_only=True)
class BackendsConfig:
    """`engine.backends.*`: which implementation of each kernel op; auto takes the best that runs here."""

    experts: str = "auto"
    grouped_swiglu: str = "auto"
    grouped_swiglu_packed: str = "auto"
    latent_attention: str = "auto"
    latent_output: str = "auto"
    latent_project: str = "auto"
    latent_rows: str = "auto"
    linear: str = "auto"
    matmul_heads: str = "auto"
    matmul_rows: str = "auto"
    moe_output: str = "auto"
    program: str = "auto"
    rms_norm: str = "auto"
    route_tokens: str = "auto"
    router: str = "auto"
    silu_and_mul: str = "auto"
    swiglu: str = "auto"
    weighted_sum: str = "auto"


@dataclass(kw_only=True)
class EngineConfig:
    """`engine.*`: what one rank may hold and do. null means: chosen for the device (`pegahpc plan` shows it)."""

    page_tokens: int = 64
    cache_tokens: int = 16384
    max_num_seqs: int = 64
    max_rows_per_step: int = 128
    max_prefill_rows: int = 96
    prefix_cache: bool = True
    idle_wait_ms: float | None = None
    row_invariant: bool | None = None
    dispatcher: str = "auto"
    dtype: str = "auto"
    cache_format: str = "auto"  # plain: rows in the engine's type; fp8: lines with an indexer, and on GPUs their auto
    packed_experts: bool | None = None  # kept as the checkpoint packs them; null: on GPUs, or where nothing else fits
    num_threads: int | None = None
    backends: BackendsConfig = field(default_factory=BackendsConfig)

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.page_tokens & (self.page_tokens - 1):
            raise ConfigError(f"engine.page_tokens: {self.page_tokens} is not a power of two")
        _at_least("engine.cache_tokens", self.cache_tokens, self.page_tokens, " tokens")
        _at_least("engine.max_num_seqs", self.max_num_seqs, 1)
        _at_least("engine.max_prefill_rows", self.max_prefill_rows, 1)
        _at_least("engine.max_rows_per_step", self.max_rows_per_step, self.max_num_seqs)
        if self.idle_wait_ms is not None:
            _at_least("engine.idle_wait_ms", self.idle_wait_ms, 0, " ms")
        if self.num_threads is not None:
            _at_least("engine.num_threads", self.num_threads, 1)
        _one_of("engine.dispatcher", self.dispatcher, DISPATCHERS)
        _one_of("engine.dtype", self.dtype, DTYPES)
        _one_of("engine.cache_format", self.cache_format, CACHE_FORMATS)


@dataclass(kw_only=True)
class GatewayConfig:
    """`gateway.*`: the OpenAI endpoint of the head."""

    host: str | None = None  # null: the cluster's interface (127.0.0.1 for cluster=local)
    port: int = 8000  # 0: any free port; `pegahpc url` prints it
    default_max_tokens: int = 512
    max_body_bytes: int = 1 << 20
    max_concurrent_requests: int = 1024
    affinity_load_bound: int = 8  # running + 4 * waiting beyond the least loaded rank's that a prefix hit may cost
    cors_origins: list[str] = field(default_factory=list)  # of web pages whose browsers may show them our answers
    stall_s: float = 10.0  # /health fails when a rank's step has not advanced for so long

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway.port: {self.port} is not in 0..65535")
        _at_least("gateway.default_max_tokens", self.default_max_tokens, 1, " tokens")
        _at_least("gateway.max_body_bytes", self.max_body_bytes, 1024, " bytes")
        _at_least("gateway.max_concurrent_requests", self.max_concurrent_requests, 1)
        _at_least("gateway.affinity_load_bound", self.affinity_load_bound, 0)
        _at_least("gateway.stall_s", self.stall_s, 1, " s")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"gateway.cors_origins: {origin!r} is no origin; write scheme://host or scheme://host:port, or '*'"
                )


@dataclass(kw_only=True)
class FleetConfig:
    """Root of the tree: one fleet, from submission to the last rank."""

    fleet: LifeConfig = MISSING
    model: ModelConfig = MISSING
    topology: TopologyConfig = MISSING
    cluster: ClusterConfig = MISSING
    engine: EngineConfig = MISSING
    gateway: GatewayConfig = MISSING

    @property
    def folder(self) -> Path:
        """The fleet's folder on the shared file system: record, secret, logs, events."""
        return Path(self.fleet.home) / "fleets" / self.fleet.name


def register() -> None:
    """Put the schema where conf/config.yaml's defaults list finds it."""
    ConfigStore.instance().store(name="fleet_schema", node=FleetConfig)
    OmegaConf.register_new_resolver("pegahpc_assets", lambda name: str(ASSETS / name), replace=True)


def to_fleet(cfg: DictConfig) -> FleetConfig:
    """Leave Hydra: from here on the code sees plain dataclasses, never a DictConfig.

    Raises:
        ConfigError: a value is missing, of the wrong type, or out of bounds.
    """
    try:
        fleet = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(_sentence(error)) from None
    assert isinstance(fleet, FleetConfig)
    return fleet


def compose_fleet(overrides: Sequence[str]) -> FleetConfig:
    """Compose conf/ with the user's overrides (`topology=ep4 engine.idle_wait_ms=0`).

    Raises:
        ConfigError: an unknown key or group, a wrong type, a missing or impossible value.
    """
    register()
    _refuse_new_keys(overrides)
    try:
        with initialize_config_module(version_base="1.3", config_module="pegahpc.conf"):
            return to_fleet(compose("config", overrides=list(overrides)))
    except HydraException as error:
        raise ConfigError(_sentence(error)) from None


def _refuse_new_keys(overrides: Sequence[str]) -> None:
    """Hydra's `+key=value` adds a key and `~key` takes one away; the schema has all that there are."""
    for override in overrides:
        if override[:1] in ("+", "~"):
            key = override.lstrip("+~").partition("=")[0]
            raise ConfigError(f"{key}: keys are neither added (+) nor removed (~); write {key}=VALUE")


def _sentence(error: Exception) -> str:
    """What Hydra or OmegaConf found, on one line, the key first where they name one."""
    found = error.__cause__ or error
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    if isinstance(found, MissingMandatoryValue):
        return f"{key}: is required; set it with {key}=VALUE"
    if "Config search path:" in lines:  # where Hydra looked is no help: there is one place
        lines = lines[: lines.index("Config search path:")]
    said = [line for line in lines if not line.startswith(("full_key:", "object_type=", "See https:"))]
    return f"{key}: {said[0]}" if key else " ".join(said)
