"""What `pegahpc plan` prints: what one rank holds and why, every width beside the one asked for, and the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pegahpc.plan import Plan


def plan_report(plan: Plan) -> RenderableType:
    """All of it, the verdict last."""
    parts = [_rank_table(plan), _width_table(plan)]
    if plan.has_weights:
        parts.append(_ranks_table(plan))
    return Group(*parts, _verdict(plan))


def _title(plan: Plan) -> str:
    fleet, topology = plan.fleet, plan.fleet.topology
    source = "" if plan.has_weights else ", from config.json alone"
    ranks = f"{topology.num_trays} trays x {topology.ranks_per_tray} ranks = EP{topology.ep_size}"
    return f"{escape(fleet.model.name)} ({plan.line}{source}): {ranks}, {plan.num_experts} experts"


def _rank_table(plan: Plan) -> Table:
    """One rank's memory, a line for each thing that is in it."""
    engine = plan.fleet.engine
    settings = (
        f"weights {plan.weight_format}, dtype {engine.dtype}, cache {engine.cache_format}",
        f"dispatcher {engine.dispatcher}, {engine.num_threads} threads a rank, idle wait {engine.idle_wait_ms:g} ms",
        f"row invariant {'yes' if engine.row_invariant else 'no'}; fingerprint {plan.fingerprint}",
    )
    table = Table(
        title=_title(plan), caption=", ".join(settings), title_justify="left", caption_justify="left", box=SIMPLE_HEAD
    )
    table.add_column("one rank")
    table.add_column("size", justify="right")
    table.add_column("because", overflow="fold")
    for row in _holdings(plan):
        table.add_row(*row)
    return table


def _holdings(plan: Plan) -> Iterator[tuple[str, str, str]]:
    engine, topology = plan.fleet.engine, plan.fleet.topology
    share = f"{plan.num_local_experts} of {plan.num_experts} experts, and all that is not an expert"
    yield "weights, as stored", size(plan.weights_bytes_per_rank), f"{plan.num_tensors_per_rank:,} tensors: {share}"
    change = plan.held_bytes_per_rank - plan.weights_bytes_per_rank
    how = [f"{engine.dtype}"] + ["routers in float32"] * (engine.dtype != "float32")
    if plan.weight_format != "plain":
        how.append("packed experts as they are" if engine.packed_experts else "packed experts unpacked")
    yield "weights, in the engine", size(plan.held_bytes_per_rank), f"{signed(change)}: {', '.join(how)}"
    rows = " + ".join(f"{group.num_layers} layers x {group.layer_bytes:,} B ({group.name})"
                      for group in plan.cache_groups if group.kind == "append")  # fmt: skip
    yield "a token of cache", f"{plan.cache_bytes_per_token:,} B", rows
    stride = f"{engine.page_tokens} tokens of all layers, one after the other; names the layout"
    yield "a page", f"{plan.page_stride_bytes:,} B", stride
    asked = f"{plan.num_pages:,} pages: engine.cache_tokens={engine.cache_tokens}, and the padding page"
    yield "cache", size(plan.cache_bytes), asked
    if plan.state_bytes_per_slot:
        slot = f"{plan.state_bytes_per_slot:,} B a running request, engine.max_num_seqs={engine.max_num_seqs}"
        yield "states", size(plan.state_bytes), slot
    if plan.slab_bytes:
        yield "slab", size(plan.slab_bytes), f"two windows of a step's rows for each of {topology.ep_size} ranks"
    if plan.reserve_bytes:
        yield "reserve", size(plan.reserve_bytes), "context, graphs, collective buffers, activations"
    if plan.device_bytes is not None:
        yield _device(plan)


def _device(plan: Plan) -> tuple[str, str, str]:
    assert plan.device_bytes is not None
    if plan.fleet.cluster.device == "cpu":
        name, why = "the machine", f"for all {plan.fleet.topology.world_size} ranks"
    else:
        name, why = "a device", "cluster.device_memory_gib" + (" is not set: a GB300" if plan.is_device_assumed else "")
    tokens = max(0, (plan.max_pages or 0) - 1) * plan.fleet.engine.page_tokens
    return name, size(plan.device_bytes), f"{why}; room for {plan.max_pages or 0:,} pages, {tokens:,} tokens a rank"


def _width_table(plan: Plan) -> Table:
    """The same configuration at every width."""
    table = Table(title="the same at every width (of one rank)", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("", "experts", "tensors", "weights", "in the engine", "with all it asks", "most tokens", ""):
        table.add_column(heading, justify="right")
    for width in plan.widths:
        is_asked = width.ep_size == plan.fleet.topology.ep_size
        most = "?" if width.max_pages is None else f"{max(0, width.max_pages - 1) * plan.fleet.engine.page_tokens:,}"
        verdict = {None: "", True: "[green]fits[/]", False: "[red]does not fit[/]"}[width.fits]
        table.add_row(
            f"EP{width.ep_size}",
            str(plan.num_experts // width.ep_size),
            f"{width.num_tensors_per_rank:,}",
            size(width.weights_bytes_per_rank),
            size(width.held_bytes_per_rank),
            size(width.needed_bytes),
            most,
            verdict,
            style="bold" if is_asked else "dim",
        )
    return table


def _ranks_table(plan: Plan) -> Table:
    """Every rank: where it runs, which experts it holds, what it keeps in memory."""
    topology, cluster = plan.fleet.topology, plan.fleet.cluster
    table = Table()
    for heading in ("rank", "tray", "device", "experts", "weights", "cache", "sum"):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    for rank in range(topology.world_size):
        tray, local_rank = divmod(rank, topology.ranks_per_tray)
        device = cluster.device if cluster.device == "cpu" else f"{cluster.device}:{local_rank}"
        sizes = (plan.held_bytes_per_rank, plan.cache_bytes, plan.held_bytes_per_rank + plan.cache_bytes)
        table.add_row(str(rank), str(tray), device, expert_range(plan, rank), *map(size, sizes))
    return table


def expert_range(plan: Plan, rank: int) -> str:
    """The ids of the experts that a rank holds: `4..7`."""
    if not plan.num_local_experts:
        return "none"
    first = rank * plan.num_local_experts
    return f"{first}..{first + plan.num_local_experts - 1}"


def _verdict(plan: Plan) -> Text:
    """One line, and why the engine would refuse."""
    text = Text()
    if plan.fits is False:
        text.append("does not fit", style="red").append(f"; {plan.advice}\n")
    elif plan.fits:
        text.append("fits", style="green").append("\n")
    if plan.unserved:
        text.append("cannot be served yet", style="yellow").append(f": {plan.unserved}\n")
    if not plan.has_weights:
        text.append("to serve it: model.path=/path/to/its/weights\n")
    return text


def size(num_bytes: int) -> str:
    """`188.0 GiB`, `12.3 MiB`."""
    return f"{num_bytes / 2**30:,.1f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def signed(num_bytes: int) -> str:
    """`+15.7 GiB`."""
    return ("+" if num_bytes >= 0 else "-") + size(abs(num_bytes))
