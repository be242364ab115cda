"""What the bench prints: one table of a run, one of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pegahpc.bench.cells import MIN_FOR_P99, Cell, Summary
from pegahpc.bench.compare import Comparison
from pegahpc.bench.result import Result

COLOURS = {"stable": "green", "noisy": "yellow", "insufficient_repeats": "yellow"}
PARTS = ("mean", "p50", "p90", "p99")
TIMES = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "ITL"),
    ("stream_chunk_gap_ms", "chunk gap"),
    ("e2e_ms", "end to end"),
)
RATES = (
    ("requests_per_s", "requests/s"),
    ("goodput_per_s", "goodput, requests/s"),
    ("output_tokens_per_s", "output tokens/s"),
    ("input_tokens_per_s", "input tokens/s"),
)


def result_table(result: Result) -> Table:
    """Medians over the repeats, with their spread; a column for each point."""
    table = Table(
        title=f"{escape(str(result.server['model_name']))} over {result.server['kind']}: {escape(result.headline)}",
        caption=escape(_caption(result)),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for cell in result.cells:
        colour = COLOURS.get(cell.marker, "red")
        table.add_column(f"{cell.key}\n[{colour}]{cell.marker}[/]", justify="right")
    for heading, values in _rows(result):
        if any(values):
            table.add_row(heading, *values)
    return table


def _rows(result: Result) -> list[tuple[str, list[str]]]:
    cells = result.cells
    rows = [("requests, failed", [_counts(cell) for cell in cells])]
    rows += [(label, [_spread(cell.summary.get(name)) for cell in cells]) for name, label in RATES]
    unit = "rank" if result.server.get("device") != "cuda" else "GPU"
    for name, label in RATES[2:]:
        values = [_spread(cell.summary.get(f"{name}_per_device")) for cell in cells]
        rows.append((f"{label} a {unit} of {result.num_devices}", values))
    for name, label in TIMES:
        rows += [(f"{label} {part}, ms", [_time(cell, name, part) for cell in cells]) for part in PARTS]
    rows.append(("prompt tokens cached", [_cached(cell) for cell in cells]))
    rows.append(("distinct experts a step", [_experts(cell, "distinct_experts") for cell in cells]))
    rows.append(("expert load, max/mean", [_experts(cell, "imbalance") for cell in cells]))
    return rows


def _caption(result: Result) -> str:
    """What is not in the table, and why."""
    lines = ["medians over repeats ± half their range; TTFT and end to end count from when a request was due"]
    repeats = [repeat for cell in result.cells for repeat in cell.repeats]
    if any(repeat.num_uncounted for repeat in repeats):
        lines.append(
            "no TPOT, no ITL where streams have not one piece a token, uncounted: 'chunk gap' is between pieces"
        )
    elif any(repeat.num_bundled for repeat in repeats):
        lines.append("no ITL where tokens came bundled: 'chunk gap' is between pieces of a stream")
    if any(0 < repeat.num_succeeded < MIN_FOR_P99 for repeat in repeats):
        lines.append(f"* of fewer than {MIN_FOR_P99} values")
    if result.num_devices is None:
        lines.append("no figures a GPU: how many there are is not known (--num-gpus)")
    if all(load is None for cell in result.cells for load in cell.experts):
        lines.append("expert load: the server reports none")
    return "\n".join(lines)


def _counts(cell: Cell) -> str:
    failed = sum(sum(repeat.failures.values()) for repeat in cell.repeats)
    total = sum(repeat.num_requests for repeat in cell.repeats)
    return f"{total}, [red]{failed}[/]" if failed else f"{total}, 0"


def _spread(summary: Summary | None) -> str:
    if summary is None:
        return ""
    half = (summary.max - summary.min) / 2
    return f"{_number(summary.median)} ±{half / abs(summary.median):.0%}" if summary.median else "0"


def _time(cell: Cell, name: str, part: str) -> str:
    if name == "stream_chunk_gap_ms" and f"itl_ms.{part}" in cell.summary:
        return ""  # they are the same
    text = _spread(cell.summary.get(f"{name}.{part}"))
    is_rough = part == "p99" and any(repeat.num_succeeded < MIN_FOR_P99 for repeat in cell.repeats)
    return f"{text}*" if text and is_rough and name not in ("itl_ms", "stream_chunk_gap_ms") else text


def _cached(cell: Cell) -> str:
    counts = [(repeat.cached_tokens, repeat.input_tokens) for repeat in cell.repeats]
    known = [(cached, total) for cached, total in counts if cached is not None]
    if not known or not sum(total for _, total in known):
        return ""
    return f"{sum(cached for cached, _ in known) / sum(total for _, total in known):.1%}"


def _experts(cell: Cell, name: str) -> str:
    values = [getattr(load, name) for load in cell.experts if load is not None]
    known: Sequence[float] = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.2f}" if known else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def comparison_table(comparison: Comparison) -> Table | Text:
    """Each figure of both sides, and their ratio; what cannot be claimed is said below. Without ratios that is all."""
    if not comparison.rows:
        return Text("\n".join([comparison.claim_marker, *_verdict(comparison)]))
    table = Table(
        title=comparison.claim_marker,
        caption=escape("\n".join(_verdict(comparison))),
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("point", "figure", "baseline", "current", "ratio", "current is"):
        table.add_column(heading, justify="left" if heading in ("point", "figure", "current is") else "right")
    for row in comparison.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.cell, row.figure, _spread(row.baseline), _spread(row.current), ratio, row.direction)
    return table


def _verdict(comparison: Comparison) -> list[str]:
    direction = "a direction is given only where no repeat of one side reaches into the other's range"
    lines = [direction] if comparison.rows else []
    lines += [f"differs: {subject}" for subject in comparison.subjects]
    lines += [f"no claim: {reason}" for reason in comparison.reasons]
    if comparison.unlike:
        lines.append("the two did not measure the same thing: no ratios")
    return lines
