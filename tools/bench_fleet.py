"""What ranks together cost and gain: exchanges, width, idleness, first tokens, invariance. Part of `make bench`.

Both sides of every ratio are taken in turn within this one run; of rounds the best counts (first tokens: the median).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_engine import new_engine, time_engine
from bench_http import PREFIX_TOKENS, LiveFigures, measure_live
from bench_provenance import provenance
from bench_world import EngineWorld, measure_exchange
from rich.console import Console
from rich.table import Table

from pegahpc.atomic import write_atomically
from pegahpc.config import compose_fleet
from pegahpc.plan import resolve

EXCHANGE_BYTES = 64 << 10
STREAMS = 32


@dataclass(frozen=True)
class Figure:
    """One promise: a number, what it is held against, and what it should be."""

    what: str
    here: str
    beside: str
    ratio: float
    wanted: str
    is_met: bool


def exchange_figures(path: Path, rounds: int) -> list[Figure]:
    """64 KB a rank among four processes."""
    us = measure_exchange(path, num_bytes=EXCHANGE_BYTES, repeats=200, rounds=rounds)
    rows = (("exchange of 64 KB, 4 processes", "fabric_us", "gloo_us"),
            ("dispatch and combine of 64 KB", "fabric_layer_us", "gloo_layer_us"))  # fmt: skip
    return [
        Figure(what, f"fabric {us[ours]:.0f} us", f"gloo {us[theirs]:.0f} us", us[theirs] / us[ours], ">= 5x",
               us[theirs] >= 5 * us[ours])
        for what, ours, theirs in rows
    ]  # fmt: skip


def width_figures(path: Path, rounds: int, say: Callable[[str], None]) -> list[Figure]:
    """EP4 beside EP1, at one stream and at 32."""
    one, many = {1: float("inf"), 4: float("inf")}, {1: float("inf"), 4: float("inf")}
    with EngineWorld(path, 1) as ep1, EngineWorld(path, 4) as ep4:
        for number in range(rounds):
            say(f"width, round {number + 1} of {rounds}")
            one = {1: min(one[1], ep1.run([1], 128)), 4: min(one[4], ep4.run([1, 0, 0, 0], 128))}
            many = {1: min(many[1], ep1.run([STREAMS], 64)), 4: min(many[4], ep4.run([STREAMS // 4] * 4, 64))}
    token_ms = {width: seconds / 128 * 1e3 for width, seconds in one.items()}
    rate = {width: STREAMS * 64 / seconds for width, seconds in many.items()}
    slower, faster = token_ms[4] / token_ms[1], rate[4] / rate[1]
    return [
        Figure("ms a token, one stream", f"EP4 {token_ms[4]:.2f}", f"EP1 {token_ms[1]:.2f}", slower, "<= 3x",
               slower <= 3),
        Figure(f"tok/s, {STREAMS} streams", f"EP4 {rate[4]:,.0f}", f"EP1 {rate[1]:,.0f}", faster, ">= 1x", faster >= 1),
    ]  # fmt: skip


def live_figures(live: LiveFigures) -> list[Figure]:
    """What users of a running fleet see."""
    return [
        Figure("idle EP4 fleet, share of a core", f"{live.idle_share:.1%}", "", live.idle_share, "< 15%",
               live.idle_share < 0.15),
        Figure("first token after 5 s idle", f"{live.after_idle_ms:.0f} ms", f"busy {live.busy_ms:.0f} ms",
               live.after_idle_ms / live.busy_ms, "<= 150 ms", live.after_idle_ms <= 150),
        Figure(f"first token, {PREFIX_TOKENS} tokens", f"warm {live.warm_ms:.0f} ms", f"cold {live.cold_ms:.0f} ms",
               live.cold_ms / live.warm_ms, ">= 5x", live.cold_ms >= 5 * live.warm_ms),
    ]  # fmt: skip


def invariance_figure(path: Path, rounds: int) -> Figure:
    """A decode step of 32 rows with and without."""
    plans = [resolve(compose_fleet(["topology=ep1", f"model.path={path}", "engine.num_threads=1",
                                    f"engine.row_invariant={flag}"])) for flag in ("true", "false")]  # fmt: skip
    engines, best = [new_engine(plan) for plan in plans], [float("inf")] * 2
    for _ in range(rounds):
        best = [min(old, time_engine(engine, STREAMS)) for old, engine in zip(best, engines, strict=True)]
    with_it, without = best
    return Figure(f"row invariance, batch {STREAMS}", f"{with_it:.2f} ms", f"without {without:.2f} ms",
                  with_it / without, "<= 1.25x", with_it <= 1.25 * without)  # fmt: skip


def main(
    path: Annotated[Path, typer.Option(help="a DeepSeek-V3 checkpoint")] = Path("assets/tiny-moe"),
    rounds: Annotated[int, typer.Option(help="rounds of both sides; the best counts")] = 5,
    idle_s: Annotated[float, typer.Option(help="how long an idle fleet is watched")] = 10.0,
    output: Annotated[Path | None, typer.Option(help="write the figures here, as JSON")] = None,
) -> None:
    """Measure a fleet of four ranks on this machine and hold it against what is promised."""
    torch.set_num_threads(1)
    path, console = path.resolve(), Console()
    with console.status("exchanges") as status:
        figures = exchange_figures(path, rounds)
        figures += width_figures(path, rounds, status.update)
        status.update("a live fleet")
        figures += live_figures(measure_live(path, rounds=rounds, idle_s=idle_s))
        status.update("row invariance")
        figures.append(invariance_figure(path, rounds))
    conditions = provenance()
    console.print(_table(figures, conditions))
    if output is not None:
        document = conditions | {"figures": [asdict(figure) for figure in figures]}
        write_atomically(output, json.dumps(document, indent=1).encode())


def _table(figures: list[Figure], conditions: dict[str, object]) -> Table:
    where = f"{conditions['cpu']}, {conditions['cores']} cores, load {conditions['load_average']}"
    table = Table(
        "what",
        "here",
        "beside",
        "ratio",
        "wanted",
        "",
        caption=f"{where}\n{conditions['commit']}, {conditions['date']}",
    )
    for figure in figures:
        met = "[green]yes[/]" if figure.is_met else "[red]NO[/]"
        table.add_row(figure.what, figure.here, figure.beside, f"{figure.ratio:.2f}", figure.wanted, met)
    return table


if __name__ == "__main__":
    typer.run(main)
