"""Two results side by side: ratios with their spread, and why no claim may be made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pegahpc.bench.cells import Cell, Summary
from pegahpc.bench.result import Result, follows_from_raw, read_raw, read_result

Direction = Literal["higher", "lower", "no difference", "no claim"]
COMPARED = (
    *(f"{name}.{part}" for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms") for part in ("p50", "p90", "p99")),
    "requests_per_s",
    "output_tokens_per_s",
    "output_tokens_per_s_per_device",
    "goodput_per_s",
)
MACHINE = ("cpu", "cores", "gpus")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of one point."""

    cell: str
    figure: str
    baseline: Summary
    current: Summary
    ratio: float | None  # current / baseline, of medians
    direction: Direction


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What may be said of two results.

    Args:
        unlike: reasons why the two did not measure the same thing; then there are no rows.
        reasons: why no directional claim is allowed, `unlike` included; empty: it is allowed.
        subjects: in what the two differ, which is what the comparison is about.
    """

    unlike: list[str]
    reasons: list[str]
    subjects: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def claim_marker(self) -> str:
        """In words."""
        return "no directional claim" if self.reasons else "directional comparison allowed"


def compare_files(baseline: Path, current: Path) -> Comparison:
    """Read two results, hold each against its raw requests, and compare them.

    Raises:
        ConfigError: a file cannot be read, or is no result.
    """
    results = {"baseline": read_result(baseline), "current": read_result(current)}
    doubts: list[str] = []
    for side, path in (("baseline", baseline), ("current", current)):
        raw = read_raw(path, results[side])
        if raw is None:
            doubts.append(f"{side}_raw_requests_missing_or_changed")
        elif not follows_from_raw(results[side], raw):
            doubts.append(f"{side}_figures_do_not_follow_from_raw_requests")
    return compare(results["baseline"], results["current"], doubts=doubts)


def compare(baseline: Result, current: Result, *, doubts: Sequence[str] = ()) -> Comparison:
    """Compare two results. `doubts` are reasons that the caller has found already."""
    unlike = [
        *_changed("workload", baseline.workload, current.workload),
        *_changed("model_snapshot", _model(baseline), _model(current)),
        *_asked(baseline, current),
    ]
    reasons = [*unlike, *doubts, *_hardware(baseline, current), *_versions(baseline, current)]
    if baseline.slo != current.slo:
        reasons.append("slo_changed")
    for side, result in (("baseline", baseline), ("current", current)):
        reasons += [f"{side}_{reason}" for reason in result.no_claim]
    return Comparison(
        unlike=unlike,
        reasons=reasons,
        subjects=_subjects(baseline, current),
        rows=[] if unlike else _rows(baseline, current, is_allowed=not reasons),
    )


def _rows(baseline: Result, current: Result, *, is_allowed: bool) -> list[Row]:
    others = {cell.key: cell for cell in current.cells}
    return [
        _row(cell, others[cell.key], name, is_allowed=is_allowed)
        for cell in baseline.cells
        if cell.key in others
        for name in COMPARED
        if name in cell.summary and name in others[cell.key].summary
    ]


def _row(baseline: Cell, current: Cell, name: str, *, is_allowed: bool) -> Row:
    a, b = baseline.summary[name], current.summary[name]
    return Row(
        cell=baseline.key,
        figure=name,
        baseline=a,
        current=b,
        ratio=round(b.median / a.median, 4) if a.median else None,
        direction=_direction(a, b) if is_allowed else "no claim",
    )


def _direction(a: Summary, b: Summary) -> Direction:
    """Only where no repeat of one side reaches into the other's range."""
    if b.min > a.max:
        return "higher"
    return "lower" if b.max < a.min else "no difference"


def _asked(baseline: Result, current: Result) -> list[str]:
    """The points that both have must have asked the same; points of one side alone are named."""
    sides = [{cell.key: cell.asked_sha256 for cell in result.cells} for result in (baseline, current)]
    a, b = sides
    reasons = [f"cell_missing:{key}" for key in a if key not in b]
    reasons += [f"cell_added:{key}" for key in b if key not in a]
    for key in a:
        shared = min(len(a[key]), len(b.get(key, [])))
        if key in b and a[key][:shared] != b[key][:shared]:
            reasons.append(f"requests_changed:{key}")
    return reasons


def _changed(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = sorted(a.keys() | b.keys())
    return [f"{what}_changed:{name}" for name in names if a.get(name) != b.get(name)]


def _model(result: Result) -> dict[str, Any]:
    model = result.server["model"]
    return model if isinstance(model, dict) else {"fingerprint": model}


def _hardware(baseline: Result, current: Result) -> list[str]:
    is_counted = baseline.num_devices is not None and current.num_devices is not None
    reasons = [] if is_counted or baseline.num_devices == current.num_devices else ["num_devices_unknown"]
    a, b = (result.server["hardware"] for result in (baseline, current))
    if isinstance(a, dict) and isinstance(b, dict):
        return reasons + _changed("hardware", _machine(a), _machine(b))
    return reasons if a == b else [*reasons, "hardware_changed"]


def _machine(hardware: Mapping[str, Any]) -> dict[str, Any]:
    """What makes machines alike: not their names, and not which board of a kind it was."""
    gpus = [{key: value for key, value in gpu.items() if key != "uuid"} for gpu in hardware.get("gpus", [])]
    return {name: gpus if name == "gpus" else hardware.get(name) for name in MACHINE}


def _versions(baseline: Result, current: Result) -> list[str]:
    """Of what the server runs on; a server of which nothing is known has its versions in the label `code`."""
    a, b = (result.server["versions"] for result in (baseline, current))
    if not isinstance(a, dict) or not isinstance(b, dict):
        return []
    return _changed("versions", *({name: a_or_b[name] for name in a_or_b if name != "pegahpc"} for a_or_b in (a, b)))


def _subjects(baseline: Result, current: Result) -> list[str]:
    """What differs and is allowed to: code, configuration, and by which way the model was asked."""
    a, b = baseline.server, current.server
    found = [f"kind: {a['kind']} -> {b['kind']}"] if a["kind"] != b["kind"] else []
    found += [f"code: {_code(a)} -> {_code(b)}"] if _code(a) != _code(b) else []
    if baseline.num_devices != current.num_devices:
        found.append(f"devices: {baseline.num_devices} -> {current.num_devices}")
    config_a, config_b = _flat(a["config"]), _flat(b["config"])
    for name in sorted(config_a.keys() | config_b.keys()):
        if config_a.get(name) != config_b.get(name):
            found.append(f"{name}: {config_a.get(name)} -> {config_b.get(name)}")
    return found


def _code(server: Mapping[str, Any]) -> str:
    code = server["code"]
    if not isinstance(code, dict):
        return str(code)
    return str(code.get("commit", code.get("wheel_sha256", "")))[:12] + ("+dirty" if code.get("is_dirty") else "")


def _flat(document: object, before: str = "config") -> dict[str, object]:
    if not isinstance(document, Mapping):
        return {before: document}
    flat: dict[str, object] = {}
    for name, value in document.items():
        flat |= _flat(value, f"{before}.{name}")
    return flat
