"""What a run may claim by itself, and the line that says the worst of it first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pegahpc.bench import provenance
from pegahpc.bench.cells import Cell
from pegahpc.bench.client_lag import LIMIT_MS


def no_claim_reasons(
    cells: Sequence[Cell], *, num_identical_prompts: int, client: Mapping[str, Any], server: Mapping[str, Any]
) -> list[str]:
    """Why a run supports no claim, whatever it is compared with; empty: it may."""
    reasons = [f"provenance_missing:{name}" for name in provenance.missing(server)]
    reasons += [] if client["code"] else ["provenance_missing:client_code"]
    codes = [side["code"] for side in (client, server) if isinstance(side["code"], Mapping)]
    reasons += ["code_is_dirty"] if any(code["is_dirty"] for code in codes) else []
    reasons += [f"identical_prompts:{num_identical_prompts}"] if num_identical_prompts else []
    return reasons + [reason for cell in cells for reason in _of_cell(cell)]


def _of_cell(cell: Cell) -> list[str]:
    found = {
        "failures": any(repeat.failures for repeat in cell.repeats),
        "prefix_cache_was_warm": any(repeat.unexplained_cached_tokens for repeat in cell.repeats),
        "client_was_slow": any(lag_ms > LIMIT_MS for lag_ms in cell.client_lag_ms),
        f"{cell.marker}_cell": cell.marker != "stable",
    }
    return [f"{reason}:{cell.key}" for reason, is_so in found.items() if is_so]


def headline(cells: Sequence[Cell], no_claim: Sequence[str]) -> str:
    """One line: failures, else why there is no claim, else that all is well."""
    num_requests = sum(repeat.num_requests for cell in cells for repeat in cell.repeats)
    failures: Counter[str] = Counter()
    for cell in cells:
        for repeat in cell.repeats:
            failures.update(repeat.failures)
    if failures:
        table = ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items()))
        return (
            f"{failures.total()} of {num_requests} requests FAILED ({table}):"
            " the figures are those of the others and support no claim"
        )
    said = f"{num_requests} of {num_requests} requests succeeded"
    return f"{said}; no claim: {', '.join(no_claim)}" if no_claim else said
