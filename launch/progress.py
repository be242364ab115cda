"""What `pegahpc up` shows while a fleet starts: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pegahpc.launch.record import FleetRecord, RankEntry

STAGES = ("boot", "rendezvous", "load", "warmup", "ready")
BAR_WIDTH = 24


class ProgressView:
    """Fed with records; shows what changed. Used as a context, so that the terminal is given back."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, transient=True, auto_refresh=False) if sys.stderr.isatty() else None
        self._said = ""

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: FleetRecord) -> None:
        """Show a record; one that says nothing new prints no line, and the end is the caller's to tell."""
        is_starting = record.state in ("starting", "loading")
        if self._live is not None and is_starting:
            self._live.update(_table(record), refresh=True)
        elif self._live is not None:
            self._live.stop()  # from here on the terminal is as usual
            self._live = None
            self._said = headline(record)
        elif record.state not in ("ended", "failed"):
            self._say(headline(record))

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._console.print(line, soft_wrap=True, markup=False)


def headline(record: FleetRecord) -> str:
    """The fleet's state in one line, which changes only when a rank enters another stage."""
    if record.state not in ("starting", "loading") or not record.ranks:
        return f"fleet {record.name}: {record.state}"
    slowest = min(record.ranks, key=_rank_order)
    num_ready = sum(entry.stage == "ready" for entry in record.ranks)
    return (
        f"fleet {record.name}: {record.state}, {num_ready} of {len(record.ranks)} ranks ready"
        f" (rank {slowest.rank}: {slowest.stage})"
    )


def _rank_order(entry: RankEntry) -> tuple[int, float]:
    return (STAGES.index(entry.stage) if entry.stage in STAGES else 0, entry.progress)


def _table(record: FleetRecord) -> Table:
    table = Table(
        title=f"{record.name}: {record.state} ({time.time() - record.started_at:.0f} s)", title_justify="left"
    )
    for heading in ("rank", "tray", "host", "stage", "progress"):
        table.add_column(heading)
    for entry in record.ranks:
        filled = round(entry.progress * BAR_WIDTH)
        bar = f"[green]{'━' * filled}[/][dim]{'━' * (BAR_WIDTH - filled)}[/] {entry.progress:>4.0%}"
        table.add_row(str(entry.rank), str(entry.tray), escape(entry.host), escape(entry.stage), bar)
    return table
