"""Counters that the ranks keep themselves: steps, and seconds in each phase. Read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from pegahpc.wire.messages import PhaseTimes


class StepCounters(Collector):
    """Exposes each rank's own totals; a Counter could only be added to."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._ranks: list[tuple[tuple[str, ...], Callable[[], tuple[int, PhaseTimes]]]] = []

    def watch(self, labels: tuple[str, ...], totals: Callable[[], tuple[int, PhaseTimes]]) -> None:
        """`totals` gives the steps and the phases of the rank with these labels."""
        self._ranks.append((labels, totals))

    def collect(self) -> Iterable[Metric]:
        """One sample a rank, and one a rank and phase."""
        steps = CounterMetricFamily("pegahpc:steps", "Steps of the rank, idle ones included.", labels=self._labels)
        phases = CounterMetricFamily(
            "pegahpc:step_phase_seconds",
            "Seconds in each phase of the rank's loop; exchange is a part of forward.",
            labels=(*self._labels, "phase"),
        )
        for labels, totals in self._ranks:
            num_steps, times = totals()
            steps.add_metric(labels, num_steps)
            for name, seconds in msgspec.structs.asdict(times).items():
                phases.add_metric((*labels, name.removesuffix("_s")), seconds)
        return steps, phases
