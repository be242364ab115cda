"""What a configuration resolves to: every "auto" decided, memory counted, impossible things refused. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import msgspec
import psutil

from pegahpc.checkpoint.files import CheckpointError, Headers, read_headers
from pegahpc.checkpoint.manifest import TensorSpec, check
from pegahpc.config import ConfigError, EngineConfig, FleetConfig
from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.spec import ModelSpec, MoEFFN

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32_PARTS = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")  # the router stays float32
MAX_PAGE_TOKENS = 256  # a split of latent attention is a whole number of pages
CPU_IDLE_WAIT_MS = 100.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A fleet that may start: `fleet` has no "auto" and no None left in `engine` and `cluster`."""

    fleet: FleetConfig
    line: str
    num_layers: int
    num_experts: int
    num_local_experts: int
    num_tensors: int  # that one rank reads
    weights_bytes: int  # of one rank, in the engine's dtype
    num_pages: int  # with the padding page
    page_stride_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int  # of one rank
    slab_bytes: int  # of one rank: where peers put rows (dispatcher fabric)
    device_bytes: int  # memory of a device (GPU), or of this machine for all ranks on it (CPU)
    fingerprint: str


def resolve(fleet: FleetConfig) -> Plan:
    """Check a configuration against its checkpoint and this machine, before anything starts.

    Raises:
        ConfigError: the message names the key and what to do.
    """
    folder = Path(fleet.model.path)
    try:
        spec = probe(read_config(folder))
        headers = read_headers(folder)
        wanted = check(spec, headers)
    except (UnsupportedModel, CheckpointError) as error:
        raise ConfigError(f"model.path: {error}") from None
    _check_topology(fleet, spec)
    fleet = replace(fleet, cluster=replace(fleet.cluster, device=_device(fleet)))
    fleet = replace(fleet, engine=_engine(fleet, headers))
    plan = _plan(fleet, spec, wanted)
    _check_memory(plan)
    return plan


def _check_topology(fleet: FleetConfig, spec: ModelSpec) -> None:
    ep_size, experts = fleet.topology.ep_size, spec.num_experts
    if ep_size > 1 and (not experts or experts % ep_size):
        fits = ", ".join(str(n) for n in range(1, max(experts, 1) + 1) if experts % n == 0 and n & (n - 1) == 0)
        raise ConfigError(f"topology.ep_size: {ep_size} ranks do not divide {experts} experts; use one of {fits}")
    if fleet.model.max_model_len > spec.max_position:
        raise ConfigError(
            f"model.max_model_len: {fleet.model.max_model_len} is above the checkpoint's"
            f" max_position_embeddings {spec.max_position}"
        )
    if fleet.engine.page_tokens > MAX_PAGE_TOKENS:
        raise ConfigError(f"engine.page_tokens: {fleet.engine.page_tokens} is above {MAX_PAGE_TOKENS}")
    if fleet.engine.dispatcher == "local" and ep_size > 1:
        raise ConfigError(f"engine.dispatcher: local serves one rank, the topology has {ep_size}; use auto")
    if fleet.engine.dispatcher == "fabric" and fleet.cluster.device == "cuda":
        raise ConfigError("engine.dispatcher: fabric serves ranks on CPUs; use auto or torch on GPUs")


def _device(fleet: FleetConfig) -> str:
    """A GPU for each rank of this machine, or CPUs for all."""
    wanted = fleet.topology.world_size  # cluster=local has all trays on one machine
    num_gpus = len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()])
    if fleet.cluster.device == "auto":
        return "cuda" if num_gpus >= wanted else "cpu"
    if fleet.cluster.device == "cuda" and num_gpus < wanted:
        raise ConfigError(
            f"cluster.device: {wanted} ranks want a GPU each, this machine has {num_gpus}; use cpu or fewer ranks"
        )
    return fleet.cluster.device


def _engine(fleet: FleetConfig, headers: Headers) -> EngineConfig:
    engine, is_cpu = fleet.engine, fleet.cluster.device == "cpu"
    dtype = engine.dtype
    if dtype == "auto":
        stored = {info.dtype for info in headers.tensors.values()}
        dtype = "float32" if is_cpu or stored == {"F32"} else "bfloat16"
    threads = 1  # a second one loses more to waiting than it computes, at the sizes that a CPU serves
    return replace(
        engine,
        dtype=dtype,
        dispatcher=_dispatcher(fleet) if engine.dispatcher == "auto" else engine.dispatcher,
        row_invariant=is_cpu if engine.row_invariant is None else engine.row_invariant,
        idle_wait_ms=(CPU_IDLE_WAIT_MS if is_cpu else 0.0) if engine.idle_wait_ms is None else engine.idle_wait_ms,
        num_threads=threads if engine.num_threads is None else engine.num_threads,
    )


def _dispatcher(fleet: FleetConfig) -> str:
    """The fabric where all ranks share a kernel, which cluster=local knows beforehand."""
    if fleet.topology.ep_size == 1:
        return "local"
    return "fabric" if fleet.cluster.kind == "local" and fleet.cluster.device == "cpu" else "torch"


def _plan(fleet: FleetConfig, spec: ModelSpec, wanted: list[TensorSpec]) -> Plan:
    item = DTYPE_BYTES[fleet.engine.dtype]
    num_local = spec.num_experts // fleet.topology.ep_size
    kept = [tensor for tensor in wanted if tensor.expert is None or tensor.expert < num_local]
    row_bytes = spec.attention.row_dim * item
    stride = spec.num_layers * fleet.engine.page_tokens * row_bytes
    num_pages = fleet.engine.cache_tokens // fleet.engine.page_tokens + 1
    return Plan(
        fleet=fleet,
        line=spec.line,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        num_local_experts=num_local,
        num_tensors=len(kept),
        weights_bytes=sum(_bytes_kept(tensor, spec, num_local, item) for tensor in kept)
        + spec.tie_word_embeddings * spec.vocab_size * spec.hidden_size * item,  # the head's own [in, out] copy
        num_pages=num_pages,
        page_stride_bytes=stride,
        cache_bytes_per_token=spec.num_layers * row_bytes,
        cache_bytes=num_pages * stride,
        slab_bytes=_slab_bytes(fleet, spec, item),
        device_bytes=_device_bytes(fleet),
        fingerprint=_fingerprint(fleet, wanted),
    )


def _bytes_kept(tensor: TensorSpec, spec: ModelSpec, num_local: int, item: int) -> int:
    size = prod(tensor.shape) * (4 if tensor.name.endswith(FLOAT32_PARTS) else item)
    return size * num_local // spec.num_experts if tensor.is_stack else size


def _slab_bytes(fleet: FleetConfig, spec: ModelSpec, item: int) -> int:
    """Two windows a peer, of all rows that a step may send it; headers left out."""
    if fleet.engine.dispatcher != "fabric":
        return 0
    num_topk = max(ffn.router.num_topk for ffn in spec.ffns if isinstance(ffn, MoEFFN))
    pairs = fleet.engine.max_rows_per_step * num_topk
    return fleet.topology.world_size * 2 * pairs * spec.hidden_size * item


def _device_bytes(fleet: FleetConfig) -> int:
    """The machine's memory on the CPU; 0 on a GPU, whose memory the preflight reads."""
    return psutil.virtual_memory().total if fleet.cluster.device == "cpu" else 0


def _check_memory(plan: Plan) -> None:
    ranks = plan.fleet.topology.world_size
    needed = ranks * (plan.weights_bytes + plan.cache_bytes + plan.slab_bytes)
    if plan.device_bytes and needed > plan.device_bytes:
        need, have = f"{needed / 2**30:.1f} GiB", f"{plan.device_bytes / 2**30:.1f} GiB"
        raise ConfigError(
            f"engine.cache_tokens: {ranks} ranks need {need} for weights, cache and slabs, the machine has {have};"
            " lower it or engine.max_rows_per_step, or use fewer ranks"
        )


def _fingerprint(fleet: FleetConfig, wanted: list[TensorSpec]) -> str:
    """Equal on every tray, or the rendezvous refuses: configuration, source, model config, tensor names and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode(asdict(fleet)))
    digest.update(source_hash().encode())
    digest.update((Path(fleet.model.path) / "config.json").read_bytes())
    digest.update(msgspec.json.encode([(tensor.name, tensor.shape) for tensor in wanted]))
    return digest.hexdigest()


@cache
def source_hash() -> str:
    """Of the package's own files, 32 hex digits: what tells one state of the code from another, committed or not."""
    digest = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parent
    for part in (package, *(path for path in sorted(package.iterdir()) if path.is_dir())):
        for pattern in ("*.py",) if part == package else ("**/*.py", "**/*.c"):
            for file in sorted(part.glob(pattern)):
                digest.update(file.read_bytes())
    return digest.hexdigest()
