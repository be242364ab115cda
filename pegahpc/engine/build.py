"""From a resolved configuration to a running engine: kernels, weights, slab, warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from pegahpc.checkpoint.load import Placement, load_decoder
from pegahpc.config import ConfigError, FleetConfig
from pegahpc.engine.loop import Engine
from pegahpc.engine.pages import PagePool
from pegahpc.engine.runner import Runner
from pegahpc.engine.scheduler import Scheduler
from pegahpc.kernels.matmul_rows import is_row_invariant
from pegahpc.kernels.registry import Place, choose
from pegahpc.kernels.selected import MADE, Kernels, select_kernels
from pegahpc.layers.rope_table import cis_table
from pegahpc.models.decoder import Decoder
from pegahpc.models.lines import probe, read_config
from pegahpc.models.served import refuse_unserved
from pegahpc.models.spec import ModelSpec, MoEFFN
from pegahpc.moe.dispatch import Dispatcher, LocalDispatcher
from pegahpc.moe.exchanges import Exchanges
from pegahpc.moe.fabric import SlabShape
from pegahpc.page_names import model_salt
from pegahpc.rank import RankContext
from pegahpc.vocabulary import Vocabulary, read_vocabulary

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_engine(
    fleet: FleetConfig,
    ctx: RankContext,
    *,
    dispatcher: Dispatcher,
    progress: Callable[[str, float], None],
) -> Engine:
    """Load this rank's weights and make its engine.

    Args:
        fleet: resolved by `pegahpc.plan.resolve`: nothing in it is "auto" or None.
        progress: called with a stage ("load", "warmup") and the share of it that is done.

    Raises:
        ConfigError, CheckpointError, UnsupportedModel: what the user can change, in words for the user.
    """
    engine_config, folder = fleet.engine, Path(fleet.model.path)
    if engine_config.num_threads is not None:
        torch.set_num_threads(engine_config.num_threads)
    spec = probe(read_config(folder))
    refuse_unserved(spec)
    vocabulary = read_vocabulary(folder, spec.vocab_size)
    if isinstance(dispatcher, LocalDispatcher):
        dispatcher.exchanges = Exchanges.alone(slab_shape(fleet))
    placement = _placement(fleet, spec, torch.device(ctx.device), dispatcher)
    decoder = load_decoder(folder, spec, placement, lambda done: progress("load", done))
    runner = _runner(fleet, spec, decoder, vocabulary=vocabulary, placement=placement)
    engine = Engine(
        rank=ctx.rank,
        scheduler=Scheduler(
            PagePool(runner.slab.shape[0], engine_config.page_tokens),
            max_num_seqs=engine_config.max_num_seqs,
            max_rows_per_step=engine_config.max_rows_per_step,
            max_prefill_rows=engine_config.max_prefill_rows,
        ),
        runner=runner,
        dispatcher=dispatcher,
        vocabulary=vocabulary,
        max_model_len=fleet.model.max_model_len,
        idle_wait_ms=engine_config.idle_wait_ms or 0.0,
        drain_timeout_s=fleet.fleet.drain_timeout_s,
        prefix_salt=model_salt(folder) if engine_config.prefix_cache else None,
    )
    progress("warmup", 0.0)
    engine.step()  # a step of padding on every rank: the first exchange is the start barrier
    progress("warmup", 1.0)
    return engine


def _placement(fleet: FleetConfig, spec: ModelSpec, device: torch.device, dispatcher: Dispatcher) -> Placement:
    dtype = DTYPES[fleet.engine.dtype]
    return Placement(
        device=device,
        dtype=dtype,
        kernels=_kernels(fleet, spec, device, dtype),
        dispatcher=dispatcher,
        packed_experts=bool(fleet.engine.packed_experts),
    )


def _runner(
    fleet: FleetConfig, spec: ModelSpec, decoder: Decoder, *, vocabulary: Vocabulary, placement: Placement
) -> Runner:
    """With its slab, zeroed, and the rope table."""
    engine, row_dim = fleet.engine, spec.attention.row_dim
    num_pages = engine.cache_tokens // engine.page_tokens + 1
    shape = (num_pages, spec.num_layers, engine.page_tokens, row_dim)
    assert spec.rope is not None  # or it would have been refused
    return Runner(
        decoder,
        torch.zeros(shape, dtype=placement.dtype, device=placement.device),
        cis_table(spec.rope, fleet.model.max_model_len).to(placement.device),
        vocabulary=vocabulary,
        max_num_seqs=engine.max_num_seqs,
        max_rows=engine.max_rows_per_step,
    )


def slab_shape(fleet: FleetConfig) -> SlabShape:
    """Protocol bounds of the fabric's slabs: a rank may send all its rows' choices to one peer."""
    spec = probe(read_config(Path(fleet.model.path)))
    moe = next(ffn for ffn in spec.ffns if isinstance(ffn, MoEFFN))
    world_size = fleet.topology.world_size
    return SlabShape(
        world_size=world_size,
        num_local_experts=spec.num_experts // world_size,
        max_pairs=fleet.engine.max_rows_per_step * moe.router.num_topk,
        hidden=spec.hidden_size,
        dtype=DTYPES[fleet.engine.dtype],
    )


def _kernels(fleet: FleetConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Kernels:
    row_invariant = bool(fleet.engine.row_invariant)
    backends = asdict(fleet.engine.backends)
    place = Place(device=device, dtype=dtype, row_invariant=row_invariant, num_threads=fleet.engine.num_threads or 1)
    try:
        if row_invariant and device.type == "cpu" and (fleet.engine.packed_experts or _needs_products(backends, place)):
            backends |= _tiles(backends, spec, dtype)
        return select_kernels(place, backends)
    except LookupError as error:
        raise ConfigError(f"engine.backends.{error.args[0]}") from None


def _needs_products(backends: Mapping[str, str], place: Place) -> bool:
    """Whether some made op is composed of the library's products; compiled ones bring their own."""
    return any(choose(op, place, backends[op]) == "parts" for op in MADE if op != "program")


def _tiles(backends: Mapping[str, str], spec: ModelSpec, dtype: torch.dtype) -> dict[str, str]:
    """Fixed tiles in place of products that change with the row count. To ask takes half a second for a small model."""
    if is_row_invariant(matmul_shapes(spec), dtype):
        return {}
    log.warning("row invariance: this library's products change with the row count; fixed tiles are used")
    ops = ("matmul_rows", "matmul_heads", "grouped_swiglu", "grouped_swiglu_packed")
    return {op: "torch" for op in ops if backends[op] == "auto"}


def matmul_shapes(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """(heads, in, out) of every product over rows that the model does."""
    a, hidden = spec.attention, spec.hidden_size
    q_dim = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
    plain = [(a.num_heads * a.v_head_dim, hidden), (hidden, spec.vocab_size)]
    plain += [(hidden, (a.q_lora_rank or q_dim) + a.row_dim)]
    plain += [(a.q_lora_rank, q_dim)] if a.q_lora_rank else []
    for ffn in set(spec.ffns):
        widths = [ffn.intermediate_size]
        if isinstance(ffn, MoEFFN):
            plain.append((hidden, ffn.router.num_experts))
            widths += [ffn.shared_intermediate_size] if ffn.shared_intermediate_size else []
        plain += [shape for width in widths for shape in ((hidden, 2 * width), (width, hidden))]
    per_head = [(a.qk_nope_head_dim, a.kv_lora_rank), (a.kv_lora_rank, a.v_head_dim)]
    return [(1, *shape) for shape in plain] + [(a.num_heads, *shape) for shape in per_head]
