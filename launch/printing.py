"""Standard output and standard error of the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegahpc.launch.record import FleetRecord


def tell_ready(folder: Path, record: FleetRecord, json: bool) -> None:
    """Say where a fleet answers and how to ask it; the key itself only in the JSON document."""
    from pegahpc.launch.endpoint import address_of

    address, api_key = address_of(folder, record)
    took_s = record.ready_at - record.started_at
    if json:
        print_json({"url": address, "api_key": api_key, "name": record.name, "ready_s": round(took_s, 2)})
        return
    select = f"--home {folder.parent.parent} --name {record.name}"
    write(f"""\
fleet {record.name} is ready after {took_s:.1f} s: {record.model} on {len(record.ranks)} ranks at {address}
The key is in {folder / "secret"} (mode 0600). Ask it:

  curl -s {address}/chat/completions -H "Authorization: Bearer $(pegahpc url {select} --key)" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{record.model}", "messages": [{{"role": "user", "content": "What is 3 plus 4?"}}]}}'
  eval "$(pegahpc url {select} --env)"      # then any OpenAI client
  pegahpc chat {select}
""")


def print_rich(renderable: Any) -> None:
    """Print a table; where there is no terminal, wide enough for a log."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(renderable)


def print_json(document: Any, indent: int = 2) -> None:
    """Print one document; indent 0: on one line."""
    import msgspec

    data = msgspec.json.encode(document)
    write((msgspec.json.format(data, indent=indent) if indent else data).decode() + "\n")


def write(text: str) -> None:
    """Standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(text: str, *, is_whole: bool = False) -> None:
    """One line on standard error; of several (a checkpoint's faults) the first and their number, or all, indented."""
    first, *others = text.splitlines() or [""]
    key, has_key, said = first.partition(": ")
    if others and has_key:
        more = re.fullmatch(r"\.\.\. and (\d+) more", others[-1])  # those beyond what a checkpoint's error lists
        num_faults = len(others) + (int(more[1]) if more else 1)
        first = f"{key}: {num_faults} faults, the first: {said}{'' if is_whole else ' (pegahpc plan lists them)'}"
    sys.stderr.write("\n    ".join([f"pegahpc: {first}", *(others if is_whole else [])]) + "\n")
