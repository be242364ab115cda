"""What the command line prints of plans, fleets and checks: rich tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from pegahpc.launch.phase_window import SHARES, WINDOW_S, shares
from pegahpc.launch.record import FleetRecord
from pegahpc.launch.status import last_seen_s, record_age_s

if TYPE_CHECKING:  # `ls` and `status` do not wait for what a plan and a check need
    from pegahpc.launch.smoke import Check

COLOURS = {"ready": "green", "failed": "red", "ended": "dim"}


def fleets_table(records: Sequence[FleetRecord]) -> Table:
    """One line for each fleet of a home."""
    table = Table()
    for heading in ("fleet", "state", "model", "ranks", "host", "since", "url or reason"):
        table.add_column(heading, overflow="fold")
    for record in records:
        url = record.gateway.url if record.gateway is not None and record.is_live else ""
        since_s = time.time() - (record.ended_at or record.started_at)
        table.add_row(
            escape(record.name),
            coloured(record.state),
            escape(record.model),
            str(len(record.ranks)),
            escape(record.host),
            duration(since_s),
            escape(url or record.reason),
        )
    return table


def status_table(record: FleetRecord) -> Table:
    """One line for each rank."""
    url = record.gateway.url if record.gateway is not None else "not yet"
    table = Table(
        title=f"{escape(record.name)}: {coloured(record.state)} {escape(record.reason)}",
        caption=f"gateway {escape(url)}; record written {duration(record_age_s(record))} ago",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("rank", "tray", "host", "pid", "stage", "step", "running", "waiting", "seen"):
        table.add_column(heading, justify="left" if heading in ("host", "stage") else "right")
    for entry in record.ranks:
        seen_s = last_seen_s(record, entry)
        table.add_row(
            str(entry.rank),
            str(entry.tray),
            escape(entry.host),
            str(entry.process.pid) if entry.process is not None else "",
            entry.stage if entry.stage == "ready" else f"{escape(entry.stage)} {entry.progress:.0%}",
            str(entry.step),
            str(entry.num_running),
            str(entry.num_waiting),
            f"{seen_s:.1f} s" if seen_s is not None else "",
        )
    return table


def phases_table(record: FleetRecord) -> Table:
    """Where each rank's time went in the last seconds; a rank that waits for slow peers shows it under exchange."""
    table = Table(
        title=f"share of each phase in the last {WINDOW_S:g} s (forward: without its exchanges)", title_justify="left"
    )
    for heading in ("rank", *SHARES):
        table.add_column(heading, justify="right")
    for entry in record.ranks:
        table.add_row(str(entry.rank), *(f"{share:.1%}" for share in shares(entry.recent_phases).values()))
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """One line for each check of `smoke`."""
    table = Table()
    for heading in ("check", "", "found", "ms"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        verdict = "[green]ok[/]" if check.is_ok else "[red]FAILED[/]"
        table.add_row(escape(check.name), verdict, escape(check.found), f"{check.ms:.0f}")
    return table


def coloured(state: str) -> str:
    """A state in its colour."""
    colour = COLOURS.get(state, "yellow")
    return f"[{colour}]{state}[/]"


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
