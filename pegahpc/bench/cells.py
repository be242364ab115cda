"""One point over its repeats: medians, spread, and the marker that says whether it may carry a claim."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import msgspec

from pegahpc.bench.experts import ExpertLoad
from pegahpc.bench.figures import Figures

Marker = Literal["stable", "noisy", "insufficient_repeats", "benchmark_error", "failed_or_timeout"]
MIN_REPEATS = 3
NOISY_SPREAD = 0.10  # (max - min) / |median|
# What must be steady for a cell to be stable.
STEADY = ("ttft_ms.p95", "tpot_ms.p95", "itl_ms.p95", "requests_per_s", "output_tokens_per_s")
MIN_FOR_P99 = 30


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the repeats."""

    median: float
    min: float
    max: float
    spread_ratio: float  # (max - min) / |median|


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One point.

    Args:
        asked_sha256: of each repeat, what was asked.
        experts: of each repeat; None where the server does not tell.
        client_lag_ms: of each repeat, the p99 of how late this client's own event loop was.
        summary: by the figure's name, `ttft_ms.p50` or `requests_per_s`.
        noisy: the figures whose spread is above NOISY_SPREAD.
    """

    key: str
    marker: Marker
    noisy: list[str]
    asked_sha256: list[str]
    repeats: list[Figures]
    experts: list[ExpertLoad | None]
    client_lag_ms: list[float]
    summary: dict[str, Summary]


def make_cell(
    key: str,
    repeats: Sequence[Figures],
    *,
    asked_sha256: Sequence[str],
    experts: Sequence[ExpertLoad | None],
    client_lag_ms: Sequence[float],
    max_failures: float,
) -> Cell:
    """Judge one point. `max_failures` is the share of requests that may fail in each repeat."""
    summary = summarize(repeats)
    noisy = [name for name in STEADY if name in summary and summary[name].spread_ratio > NOISY_SPREAD]
    return Cell(
        key=key,
        marker=_marker(repeats, noisy, max_failures),
        noisy=noisy,
        asked_sha256=list(asked_sha256),
        repeats=list(repeats),
        experts=list(experts),
        client_lag_ms=list(client_lag_ms),
        summary=summary,
    )


def summarize(repeats: Sequence[Figures]) -> dict[str, Summary]:
    """Every figure that all repeats have."""
    flat = [flatten(repeat) for repeat in repeats]
    names = [name for name in flat[0] if all(name in other for other in flat)] if flat else []
    return {name: _summary([figures[name] for figures in flat]) for name in names}


def flatten(figures: Figures) -> dict[str, float]:
    """All numbers of one repeat by name."""
    flat: dict[str, float] = {}
    document: dict[str, Any] = msgspec.to_builtins(figures)
    for name, value in document.items():
        if name.endswith("_ms") and value is not None:
            flat |= {f"{name}.{part}": number for part, number in value.items() if part != "count"}
        elif isinstance(value, float):
            flat[name] = value
    return flat


def _summary(values: Sequence[float]) -> Summary:
    middle, low, high = median(values), min(values), max(values)
    spread = (high - low) / abs(middle) if middle else (0.0 if high == low else float("inf"))
    return Summary(median=middle, min=low, max=high, spread_ratio=round(min(spread, 1e9), 6))


def _marker(repeats: Sequence[Figures], noisy: Sequence[str], max_failures: float) -> Marker:
    """The worst that holds."""
    if any(sum(repeat.failures.values()) > max_failures * repeat.num_requests for repeat in repeats):
        return "failed_or_timeout"
    if not repeats or any(not repeat.num_succeeded or not repeat.output_tokens_per_s for repeat in repeats):
        return "benchmark_error"
    if len(repeats) < MIN_REPEATS:
        return "insufficient_repeats"
    return "noisy" if noisy else "stable"
