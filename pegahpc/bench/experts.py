"""How evenly experts were loaded and how many a step touched: the difference of the ranks' counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pegahpc.wire.messages import HEARTBEAT_S, ExpertLoads

ROWS, SEEN, STEPS = "pegahpc:expert_rows_total", "pegahpc:experts_seen_total", "pegahpc:moe_steps_total"
SETTLE_S = 2 * HEARTBEAT_S  # ranks tell their counters with heartbeats
Counts = Mapping[tuple[str, int, int], float]  # (name, layer, expert or -1) -> total of all ranks


class LayerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One MoE layer while a repeat ran.

    Args:
        imbalance: rows of the busiest expert over the mean of all; 1 is even.
        distinct_experts: that a step touched, on average.
    """

    layer: int
    rows: int
    imbalance: float
    distinct_experts: float | None


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """All MoE layers, and their means; what decides how much weight a step must read."""

    layers: list[LayerLoad]
    distinct_experts: float | None
    imbalance: float
    worst_imbalance: float


def read_counts(exposition: str | None) -> Counts | None:
    """The expert counters of a scrape; None where there are none."""
    if exposition is None or ROWS not in exposition:
        return None
    counts: dict[tuple[str, int, int], float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in (ROWS, SEEN, STEPS):
                layer, expert = int(sample.labels["layer"]), int(sample.labels.get("expert", -1))
                counts[sample.name, layer, expert] += sample.value
    return counts


def counts_of(ranks: Iterable[ExpertLoads]) -> Counts:
    """The same counters, as the ranks tell them on the wire."""
    counts: dict[tuple[str, int, int], float] = defaultdict(float)
    for told in ranks:
        for layer in told.layers:
            for expert, rows in enumerate(layer.rows, told.first_expert):
                counts[ROWS, layer.layer, expert] += rows
            counts[SEEN, layer.layer, -1] += layer.num_seen
            counts[STEPS, layer.layer, -1] = max(counts[STEPS, layer.layer, -1], told.num_steps)
    return counts


def expert_load(before: Counts | None, after: Counts | None) -> ExpertLoad | None:
    """What happened between two readings; None where the server tells nothing, or no row went to an expert."""
    if before is None or after is None:
        return None
    grown = {key: count - before.get(key, 0.0) for key, count in after.items()}
    layers = [_layer(layer, grown) for layer in sorted({layer for name, layer, _ in grown if name == ROWS})]
    layers = [layer for layer in layers if layer.rows > 0]
    if not layers:
        return None
    distinct = [layer.distinct_experts for layer in layers if layer.distinct_experts is not None]
    return ExpertLoad(
        layers=layers,
        distinct_experts=round(sum(distinct) / len(distinct), 4) if distinct else None,
        imbalance=round(sum(layer.imbalance for layer in layers) / len(layers), 4),
        worst_imbalance=max(layer.imbalance for layer in layers),
    )


def _layer(layer: int, grown: Counts) -> LayerLoad:
    rows = [count for (name, number, _), count in grown.items() if name == ROWS and number == layer]
    seen, steps = grown.get((SEEN, layer, -1), 0.0), grown.get((STEPS, layer, -1), 0.0)
    return LayerLoad(
        layer=layer,
        rows=round(sum(rows)),
        imbalance=round(max(rows) * len(rows) / sum(rows), 4) if sum(rows) else 0.0,
        distinct_experts=round(seen / steps, 4) if steps else None,
    )
