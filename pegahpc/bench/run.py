"""One run: every point, warmed up, with its repeats; judged and put into a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pegahpc.bench.answers import Target
from pegahpc.bench.cells import Cell, make_cell
from pegahpc.bench.drive import Driver, Terms
from pegahpc.bench.endpoint import Unusable
from pegahpc.bench.experts import ExpertLoad, expert_load, read_counts
from pegahpc.bench.figures import Figures, Limits, figures
from pegahpc.bench.points import Closed, Point
from pegahpc.bench.records import Record
from pegahpc.bench.workload import Conversation, Workload, batch_sha256
from pegahpc.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a run consists of.

    Args:
        max_model_len: prompt and answer together; None: not known.
        num_devices: that served, all of them; None: not known.
        max_failures: the share of each repeat's requests that may fail.
    """

    points: Sequence[Point]
    num_repeats: int
    num_warmup: int
    terms: Terms
    limits: Limits | None
    num_devices: int | None
    max_model_len: int | None
    max_failures: float


class Watcher:
    """Told what happens, for a progress bar; this one shows nothing."""

    def on_batch(self, what: str, num_requests: int) -> None:
        """Requests are about to be sent."""

    def on_record(self, record: Record) -> None:
        """One of them has ended."""


async def measure(
    target: Target, workload: Workload, course: Course, watcher: Watcher
) -> tuple[list[Cell], list[Record]]:
    """All points, one after the other.

    Raises:
        ConfigError: prompts would be identical, or do not fit the context.
        Unusable: not one request of a warm-up succeeded.
    """
    cells, records = [], []
    for point in course.points:
        await _warm_up(target, workload, course, point, watcher)
        repeats: list[Figures] = []
        asked: list[str] = []
        experts: list[ExpertLoad | None] = []
        for number in range(course.num_repeats):
            batch = workload.batch(point, number)
            _check_context(batch, course.max_model_len)
            watcher.on_batch(f"{point.key}, repeat {number + 1} of {course.num_repeats}", _num_turns(batch))
            driver = Driver(target, course.terms, point=point, repeat=number, on_record=watcher.on_record)
            before = read_counts(await target.metrics())
            own = await driver.run(batch)
            experts.append(expert_load(before, read_counts(await target.metrics())))
            repeats.append(figures(own, limits=course.limits, num_devices=course.num_devices))
            asked.append(batch_sha256(batch))
            records += own
        cells.append(
            make_cell(point.key, repeats, asked_sha256=asked, experts=experts, max_failures=course.max_failures)
        )
    return cells, records


async def _warm_up(target: Target, workload: Workload, course: Course, point: Point, watcher: Watcher) -> None:
    if not course.num_warmup:
        return
    batch = workload.warmup(point, course.num_warmup)
    _check_context(batch, course.max_model_len)
    watcher.on_batch(f"{point.key}, warm-up", len(batch))
    driver = Driver(target, course.terms, point=Closed(len(batch)), repeat=-1, on_record=watcher.on_record)
    records = await driver.run(batch)
    if all(record.failure is not None for record in records):
        raise Unusable(f"the warm-up of {point.key} failed: {records[0].failure}: {records[0].detail}")


def _num_turns(batch: Sequence[Conversation]) -> int:
    return sum(len(conversation.turns) for conversation in batch)


def _check_context(batch: Sequence[Conversation], limit: int | None) -> None:
    for conversation in batch:
        needed = sum(_length(turn.prompt) + turn.output_tokens for turn in conversation.turns)
        if limit is not None and needed > limit:
            raise ConfigError(
                f"--input-tokens, --output-tokens: request {conversation.idx} needs {needed} tokens with its"
                f" answer, the model's context is {limit}; bound the lengths: lognormal:mean=100,sigma=0.5,max=200"
            )


def _length(prompt: list[int] | str) -> int:
    """Tokens, or the least that a text can be: none."""
    return len(prompt) if isinstance(prompt, list) else 0


def no_claim_reasons(
    cells: Sequence[Cell], *, num_twins: int, missing: Sequence[str], code: dict[str, Any] | None
) -> list[str]:
    """Why a run supports no claim, whatever it is compared with."""
    reasons = [f"provenance_missing:{name}" for name in missing]
    reasons += ["code_is_dirty"] if code and code.get("is_dirty") else []
    reasons += [f"identical_prompts:{num_twins}"] if num_twins else []
    for cell in cells:
        if any(repeat.failures for repeat in cell.repeats):
            reasons.append(f"failures:{cell.key}")
        if any(repeat.unexplained_cached_tokens for repeat in cell.repeats):
            reasons.append(f"prefix_cache_was_warm:{cell.key}")
        if cell.marker != "stable":
            reasons.append(f"{cell.marker}_cell:{cell.key}")
    return reasons


def headline(cells: Sequence[Cell], no_claim: Sequence[str]) -> str:
    """One line that says the worst first."""
    num_requests = sum(repeat.num_requests for cell in cells for repeat in cell.repeats)
    failures: dict[str, int] = {}
    for cell in cells:
        for repeat in cell.repeats:
            for reason, count in repeat.failures.items():
                failures[reason] = failures.get(reason, 0) + count
    if failures:
        table = ", ".join(f"{reason} {count}" for reason, count in sorted(failures.items()))
        return (
            f"{sum(failures.values())} of {num_requests} requests FAILED ({table}):"
            " the figures are those of the others and support no claim"
        )
    said = f"{num_requests} of {num_requests} requests succeeded"
    return f"{said}; no claim: {', '.join(no_claim)}" if no_claim else said
