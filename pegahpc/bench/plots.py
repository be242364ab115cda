"""Pictures of a result: the distributions of TTFT and TPOT, and latency over rate where there are several points."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pegahpc.atomic import write_atomically
from pegahpc.bench.cells import Cell
from pegahpc.bench.records import Record
from pegahpc.bench.result import Result

CURVES = (("ttft_ms", "TTFT, ms"), ("tpot_ms", "TPOT, ms"))


def plot(path: Path, result: Result, records: Sequence[Record]) -> list[Path]:
    """Write PNG files beside the result at `path`; their paths."""
    pictures = {"cdf": _distributions(result, records)}
    if len(result.cells) > 1:
        pictures["curve"] = _curves(result)
    written = []
    for name, picture in pictures.items():
        target = path.with_name(f"{path.stem}.{name}.png")
        data = BytesIO()
        picture.savefig(data, format="png")
        write_atomically(target, data.getvalue())
        written.append(target)
    return written


def _distributions(result: Result, records: Sequence[Record]) -> Figure:
    """The share of requests that were at least so fast, all repeats together."""
    picture, axes = _page(result)
    for axis, (name, label) in zip(axes, CURVES, strict=True):
        for cell in result.cells:
            own = [record for record in records if record.point == cell.key and record.failure is None]
            times = [getattr(record, name) for record in own]
            known = sorted(time for time in times if time is not None)
            if known:
                axis.step(known, np.arange(1, len(known) + 1) / len(known), where="post", label=cell.key)
        _finish(axis, x=label, y="share of requests")
    return picture


def _curves(result: Result) -> Figure:
    """Medians over repeats, with their ranges."""
    picture, axes = _page(result)
    for axis, (name, label) in zip(axes, CURVES, strict=True):
        for part in ("p50", "p99"):
            points = [_point(cell, f"{name}.{part}") for cell in result.cells]
            known = sorted(point for point in points if point is not None)
            if known:
                rates, middles, lows, highs = zip(*known, strict=True)
                errors = [np.subtract(middles, lows), np.subtract(highs, middles)]
                axis.errorbar(rates, middles, yerr=errors, marker="o", capsize=3, label=part)
        _finish(axis, x="output tokens/s", y=label)
    return picture


def _point(cell: Cell, name: str) -> tuple[float, float, float, float] | None:
    rate, time = cell.summary.get("output_tokens_per_s"), cell.summary.get(name)
    return None if rate is None or time is None else (rate.median, time.median, time.min, time.max)


def _page(result: Result) -> tuple[Figure, list[Axes]]:
    picture = Figure(figsize=(11, 4.5), layout="constrained")
    picture.suptitle(f"{result.server['model_name']} over {result.server['kind']}: {result.headline}"[:140], fontsize=9)
    return picture, list(picture.subplots(1, len(CURVES)))


def _finish(axis: Axes, *, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(visible=True, alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    else:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
