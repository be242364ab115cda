"""What a configuration resolves to: every "auto" decided, memory counted, impossible things refused. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import psutil

from pegahpc.budget import GPU_RESERVE_BYTES, WIDTHS, Demand, Weights, Width, advice, gib, width
from pegahpc.cache_layout import ITEM_BYTES, CacheGroup, cache_layout
from pegahpc.checkpoint.files import CheckpointError, has_weights, read_headers
from pegahpc.checkpoint.manifest import TensorSpec, check, manifest
from pegahpc.config import ConfigError, EngineConfig, FleetConfig
from pegahpc.kernels import native
from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.served import refuse_unserved
from pegahpc.models.spec import ModelSpec, MoEFFN

MAX_PAGE_TOKENS = 256  # a split of latent attention is a whole number of pages
CPU_IDLE_WAIT_MS = 100.0
ASSUMED_DEVICE_BYTES = 284_208 << 20  # of a GB300, for a plan without weights that names no device


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A fleet that may start: `fleet` has no "auto" and no None left in `engine` and `cluster`."""

    fleet: FleetConfig
    line: str
    num_layers: int
    num_experts: int
    num_local_experts: int
    num_tensors_per_rank: int
    weights_bytes_per_rank: int  # as the checkpoint stores them
    held_bytes_per_rank: int  # as the engine holds them
    num_pages: int  # with the padding page
    max_pages: int | None  # that would fit, with the padding page; None: the device's memory is not known
    page_stride_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int  # of one rank
    state_bytes_per_slot: int  # of a running request; 0 for lines whose cache is pages alone
    state_bytes: int  # of one rank, for engine.max_num_seqs
    slab_bytes: int  # of one rank: where peers put rows (dispatcher fabric)
    reserve_bytes: int  # of a GPU, for what is not counted
    device_bytes: int | None  # memory of a device (GPU), or of this machine for all ranks on it (CPU)
    is_device_assumed: bool  # nobody named a device: a common one
    cache_groups: tuple[CacheGroup, ...]
    widths: tuple[Width, ...]  # the same at every width that the experts allow
    weight_format: str  # that the checkpoint packs matrices in, or "plain"
    has_weights: bool  # False: planned from config.json alone
    unserved: str  # why the engine cannot serve the model yet; empty: it can
    fits: bool | None
    advice: str  # what would fit, where this does not
    fingerprint: str


def resolve(fleet: FleetConfig, *, is_plan_only: bool = False) -> Plan:
    """Check a configuration against its checkpoint and this machine, before anything starts.

    Args:
        is_plan_only: nothing will be started: a config.json without weights is enough, the devices need not be here,
            and a model whose parts are not built yet, or which does not fit, is planned all the same.

    Raises:
        ConfigError: the message names the key and what to do.
    """
    folder = Path(fleet.model.path)
    is_here = has_weights(folder) or not is_plan_only
    try:
        spec = probe(read_config(folder))
        _check_topology(fleet, spec)
        wanted = check(spec, read_headers(folder)) if is_here else _usual(spec, fleet.topology.ep_size)
        unserved = _unserved(spec)
        if unserved and not is_plan_only:
            raise UnsupportedModel(unserved)
    except (UnsupportedModel, CheckpointError) as error:
        where = "" if has_weights(folder) else "; set model.path to the folder of the weights (a plan needs none)"
        raise ConfigError(f"model.path: {error}{where}") from None
    fleet = replace(fleet, cluster=replace(fleet.cluster, device=_device(fleet, is_here)))
    is_packing_open = fleet.engine.packed_experts is None
    fleet = replace(fleet, engine=_engine(fleet, spec, wanted))
    plan = replace(_plan(fleet, spec, wanted, is_here), unserved=unserved)
    if plan.fits is False and is_packing_open and not fleet.engine.packed_experts:  # slower, but it may fit
        fleet = replace(fleet, engine=replace(fleet.engine, packed_experts=True))
        plan = replace(_plan(fleet, spec, wanted, is_here), unserved=unserved)
    if plan.fits is False and is_here:
        raise ConfigError(_refusal(plan))
    return plan


def _usual(spec: ModelSpec, ep_size: int) -> list[TensorSpec]:
    """One rank's tensors as config.json alone makes one expect them."""
    return manifest(spec, experts=range(spec.num_experts // ep_size))


def _unserved(spec: ModelSpec) -> str:
    try:
        refuse_unserved(spec)
    except UnsupportedModel as error:
        return str(error)
    return ""


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
    if fleet.engine.dispatcher == "fabric" and native.library() is None:
        raise ConfigError("engine.dispatcher: fabric needs a C compiler (cc, gcc or clang); use auto or torch without")


def _device(fleet: FleetConfig, is_here: bool) -> str:
    """A GPU for each rank of this machine, or CPUs for all; any device for a plan that starts nothing here."""
    if not is_here:
        return "cuda" if fleet.cluster.device == "auto" else fleet.cluster.device
    wanted = fleet.topology.world_size  # cluster=local has all trays on one machine
    num_gpus = len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()])
    if fleet.cluster.device == "auto":
        return "cuda" if num_gpus >= wanted else "cpu"
    if fleet.cluster.device == "cuda" and num_gpus < wanted:
        raise ConfigError(
            f"cluster.device: {wanted} ranks want a GPU each, this machine has {num_gpus}; use cpu or fewer ranks"
        )
    return fleet.cluster.device


def _engine(fleet: FleetConfig, spec: ModelSpec, wanted: list[TensorSpec]) -> EngineConfig:
    engine, is_cpu = fleet.engine, fleet.cluster.device == "cpu"
    dtype = engine.dtype
    if dtype == "auto":
        stored = {tensor.dtypes[0] for tensor in wanted}
        dtype = "float32" if is_cpu or stored == {"F32"} else "bfloat16"
    threads = 1  # a second one loses more to waiting than it computes, at the sizes that a CPU serves
    return replace(
        engine,
        dtype=dtype,
        packed_experts=not is_cpu if engine.packed_experts is None else engine.packed_experts,
        cache_format=_cache_format(fleet, spec),
        dispatcher=_dispatcher(fleet) if engine.dispatcher == "auto" else engine.dispatcher,
        row_invariant=is_cpu if engine.row_invariant is None else engine.row_invariant,
        idle_wait_ms=(CPU_IDLE_WAIT_MS if is_cpu else 0.0) if engine.idle_wait_ms is None else engine.idle_wait_ms,
        num_threads=threads if engine.num_threads is None else engine.num_threads,
    )


def _cache_format(fleet: FleetConfig, spec: ModelSpec) -> str:
    has_indexer = spec.latent.indexer is not None
    asked = fleet.engine.cache_format
    if asked == "fp8" and not has_indexer:
        raise ConfigError(
            f"engine.cache_format: fp8 rows are those of lines with an indexer, not of {spec.line}; use plain"
        )
    if asked == "auto":
        return "fp8" if has_indexer and fleet.cluster.device == "cuda" else "plain"
    return asked


def _dispatcher(fleet: FleetConfig) -> str:
    """The fabric where all ranks share a kernel, which cluster=local knows beforehand, and its C code can be had."""
    if fleet.topology.ep_size == 1:
        return "local"
    is_one_host = fleet.cluster.kind == "local" and fleet.cluster.device == "cpu"
    return "fabric" if is_one_host and native.library() is not None else "torch"


def _plan(fleet: FleetConfig, spec: ModelSpec, wanted: list[TensorSpec], is_here: bool) -> Plan:
    ep_size = fleet.topology.ep_size
    weights, demand = _weights(fleet, spec, wanted, is_here), _demand(fleet, spec)
    device_bytes, layout = _device_bytes(fleet, is_here), demand.layout
    sizes = [size for size in WIDTHS if size == 1 or (spec.num_experts and spec.num_experts % size == 0)]
    widths = tuple(width(size, weights, demand, _share(fleet, device_bytes, size)) for size in sizes)
    own = width(ep_size, weights, demand, _share(fleet, device_bytes, ep_size))
    return Plan(
        fleet=fleet,
        line=spec.line,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        num_local_experts=spec.num_experts // ep_size,
        num_tensors_per_rank=own.num_tensors_per_rank,
        weights_bytes_per_rank=own.weights_bytes_per_rank,
        held_bytes_per_rank=own.held_bytes_per_rank,
        num_pages=demand.num_pages,
        max_pages=own.max_pages,
        page_stride_bytes=layout.page_stride_bytes,
        cache_bytes_per_token=layout.bytes_per_token,
        cache_bytes=demand.num_pages * layout.page_stride_bytes,
        state_bytes_per_slot=layout.state_bytes_per_slot,
        state_bytes=demand.state_bytes,
        slab_bytes=ep_size * demand.slab_bytes_per_peer,
        reserve_bytes=demand.reserve_bytes,
        device_bytes=device_bytes,
        is_device_assumed=not is_here and fleet.cluster.device_memory_gib is None and fleet.cluster.device == "cuda",
        cache_groups=layout.groups,
        widths=widths,
        weight_format=spec.quantization.format.name if spec.quantization else "plain",
        has_weights=is_here,
        unserved="",
        fits=own.fits,
        advice="" if own.fits is not False else advice(own, widths, demand),
        fingerprint=_fingerprint(fleet, wanted),
    )


def _weights(fleet: FleetConfig, spec: ModelSpec, wanted: list[TensorSpec], is_here: bool) -> Weights:
    item = ITEM_BYTES[fleet.engine.dtype]
    counted = Weights.of(
        wanted,
        item,
        packed_experts=bool(fleet.engine.packed_experts),
        num_copies=1 if is_here else fleet.topology.ep_size,
    )
    tied = spec.tie_word_embeddings * spec.vocab_size * spec.hidden_size * item  # the head's own [in, out] copy
    return replace(counted, shared_held_bytes=counted.shared_held_bytes + tied)


def _demand(fleet: FleetConfig, spec: ModelSpec) -> Demand:
    engine = fleet.engine
    format = "fp8" if engine.cache_format == "fp8" else engine.dtype
    return Demand(
        layout=cache_layout(spec, format, engine.page_tokens),
        num_pages=engine.cache_tokens // engine.page_tokens + 1,
        num_slots=engine.max_num_seqs,
        slab_bytes_per_peer=_slab_bytes_per_peer(fleet, spec),
        reserve_bytes=GPU_RESERVE_BYTES if fleet.cluster.device == "cuda" else 0,
    )


def _slab_bytes_per_peer(fleet: FleetConfig, spec: ModelSpec) -> int:
    """Two windows of all rows that a step may send; headers left out."""
    if fleet.engine.dispatcher != "fabric":
        return 0
    num_topk = max(ffn.router.num_topk for ffn in spec.ffns if isinstance(ffn, MoEFFN))
    pairs = fleet.engine.max_rows_per_step * num_topk
    return 2 * pairs * spec.hidden_size * ITEM_BYTES[fleet.engine.dtype]


def _device_bytes(fleet: FleetConfig, is_here: bool) -> int | None:
    """What the user says; else this machine's memory on the CPU. A GPU's is not known before the preflight reads it."""
    if fleet.cluster.device_memory_gib is not None:
        return int(fleet.cluster.device_memory_gib * 2**30)
    if fleet.cluster.device == "cpu":
        return psutil.virtual_memory().total
    return None if is_here else ASSUMED_DEVICE_BYTES


def _share(fleet: FleetConfig, device_bytes: int | None, ep_size: int) -> int | None:
    """What of it is one rank's: a GPU's all, a machine's an equal part."""
    if device_bytes is None:
        return None
    return device_bytes // ep_size if fleet.cluster.device == "cpu" else device_bytes


def _refusal(plan: Plan) -> str:
    ranks, own = plan.fleet.topology.world_size, plan.held_bytes_per_rank + plan.cache_bytes + plan.slab_bytes
    own += plan.state_bytes + plan.reserve_bytes
    assert plan.device_bytes is not None
    if plan.fleet.cluster.device == "cpu":
        return (
            f"engine.cache_tokens: {ranks} ranks need {gib(ranks * own)} for weights, cache and slabs, the machine has"
            f" {gib(plan.device_bytes)}; lower it or engine.max_rows_per_step, or use fewer ranks"
        )
    return (
        f"topology.ep_size: a rank needs {gib(own)} (weights {gib(plan.held_bytes_per_rank)}, cache"
        f" {gib(plan.cache_bytes)}), a device has {gib(plan.device_bytes)}; {plan.advice}"
    )


def _fingerprint(fleet: FleetConfig, wanted: list[TensorSpec]) -> str:
    """Equal on every tray, or the rendezvous refuses: configuration, source, model config, tensors by name and kind."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode(asdict(fleet)))
    digest.update(source_hash().encode())
    digest.update((Path(fleet.model.path) / "config.json").read_bytes())
    digest.update(msgspec.json.encode([(tensor.name, tensor.shape, tensor.dtypes) for tensor in wanted]))
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
