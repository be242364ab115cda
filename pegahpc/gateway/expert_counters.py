"""Rows of each routed expert, and how many experts a step touches: they decide what a step costs. Read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from pegahpc.wire.messages import ExpertLoads


class ExpertCounters(Collector):
    """Exposes the ranks' own totals. An expert has one rank, so sums over `engine` are the fleet's.

    Distinct experts a step of a layer: increase of `pegahpc:experts_seen` over that of `pegahpc:moe_steps`.
    """

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._ranks: list[tuple[tuple[str, ...], Callable[[], ExpertLoads]]] = []

    def watch(self, labels: tuple[str, ...], loads: Callable[[], ExpertLoads]) -> None:
        """`loads` gives what the rank with these labels told last."""
        self._ranks.append((labels, loads))

    def collect(self) -> Iterable[Metric]:
        """One sample an expert of a layer; the experts seen, a rank and layer; the steps with work, once a layer."""
        by_layer = (*self._labels, "layer")
        rows = CounterMetricFamily("pegahpc:expert_rows", "Rows computed by the expert.", labels=(*by_layer, "expert"))
        seen = CounterMetricFamily("pegahpc:experts_seen", "Experts with rows, summed over steps.", labels=by_layer)
        steps = CounterMetricFamily("pegahpc:moe_steps", "Steps in which some rank had work.", labels=["layer"])
        num_steps: dict[int, int] = {}
        for labels, loads in self._ranks:
            told = loads()
            for layer in told.layers:
                for expert, count in enumerate(layer.rows, told.first_expert):
                    rows.add_metric((*labels, str(layer.layer), str(expert)), count)
                seen.add_metric((*labels, str(layer.layer)), layer.num_seen)
                num_steps[layer.layer] = max(num_steps.get(layer.layer, 0), told.num_steps)
        for number, count in sorted(num_steps.items()):
            steps.add_metric([str(number)], count)
        return rows, seen, steps
