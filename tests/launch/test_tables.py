"""Tables show data as it is: a bracket in a reason is no markup."""

import io

import pytest
from rich.console import Console

from pegahpc.launch.identity import ProcessId
from pegahpc.launch.record import RankEntry, new_record
from pegahpc.launch.smoke import Check
from pegahpc.launch.tables import checks_table, fleets_table, status_table

ODD = "no [/x] but [red]brackets[/red]"


@pytest.mark.parametrize("which", ["fleets", "status", "checks"])
def test_brackets_are_printed_as_they_are(which: str) -> None:
    record = new_record(name="a", run_id="r", model=ODD, launcher=ProcessId.own())
    record.state, record.reason, record.host, record.ended_at = "failed", ODD, ODD, 1.0
    record.ranks = [RankEntry(rank=0, tray=0, host=ODD)]
    check = Check(name=ODD, is_ok=True, found=ODD, ms=1)
    tables = {"fleets": fleets_table([record]), "status": status_table(record), "checks": checks_table([check])}
    out = io.StringIO()
    Console(width=400, file=out).print(tables[which])
    assert out.getvalue().count(ODD) >= 1 + (which != "status")
