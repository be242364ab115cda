"""The course of a run: every point warmed up, then measured in its repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pegahpc.bench.answers import Target
from pegahpc.bench.cells import Cell, make_cell
from pegahpc.bench.client_lag import watched_client
from pegahpc.bench.drive import Driver, Terms
from pegahpc.bench.endpoint import Unusable
from pegahpc.bench.experts import ExpertLoad, expert_load
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


@dataclass(frozen=True)
class Repeat:
    """One repeat of a point, measured."""

    records: list[Record]
    figures: Figures
    asked_sha256: str
    experts: ExpertLoad | None
    client_lag_ms: float


class Measurement:
    """Measures a target along a course."""

    def __init__(self, target: Target, workload: Workload, course: Course, watcher: Watcher) -> None:
        self._target = target
        self._workload = workload
        self._course = course
        self._watcher = watcher

    async def run(self) -> tuple[list[Cell], list[Record]]:
        """All points, one after the other.

        Raises:
            ConfigError: prompts would be identical, or do not fit the context.
            Unusable: not one request of a warm-up succeeded.
        """
        cells, records = [], []
        for point in self._course.points:
            await self._warm_up(point)
            repeats = [await self._repeat(point, number) for number in range(self._course.num_repeats)]
            cells.append(self._cell(point, repeats))
            records += [record for repeat in repeats for record in repeat.records]
        return cells, records

    async def _warm_up(self, point: Point) -> None:
        if not self._course.num_warmup:
            return
        batch = self._workload.warmup(point, self._course.num_warmup)
        _check_context(batch, self._course.max_model_len)
        self._watcher.on_batch(f"{point.key}, warm-up", len(batch))
        records = await self._driver(Closed(len(batch)), repeat=-1).run(batch)
        if all(record.failure is not None for record in records):
            raise Unusable(f"the warm-up of {point.key} failed: {records[0].failure}: {records[0].detail}")

    async def _repeat(self, point: Point, number: int) -> Repeat:
        course = self._course
        batch = self._workload.batch(point, number)
        _check_context(batch, course.max_model_len)
        num_requests = sum(len(conversation.turns) for conversation in batch)
        self._watcher.on_batch(f"{point.key}, repeat {number + 1} of {course.num_repeats}", num_requests)
        before = await self._target.expert_counts()
        async with watched_client() as lag:
            records = await self._driver(point, repeat=number).run(batch)
        after = await self._target.expert_counts()
        return Repeat(
            records=records,
            figures=figures(records, limits=course.limits, num_devices=course.num_devices),
            asked_sha256=batch_sha256(batch),
            experts=expert_load(before, after),
            client_lag_ms=lag.p99_ms,
        )

    def _driver(self, point: Point, *, repeat: int) -> Driver:
        on_record = self._watcher.on_record
        return Driver(self._target, self._course.terms, point=point, repeat=repeat, on_record=on_record)

    def _cell(self, point: Point, repeats: Sequence[Repeat]) -> Cell:
        return make_cell(
            point.key,
            [repeat.figures for repeat in repeats],
            asked_sha256=[repeat.asked_sha256 for repeat in repeats],
            experts=[repeat.experts for repeat in repeats],
            client_lag_ms=[repeat.client_lag_ms for repeat in repeats],
            max_failures=self._course.max_failures,
        )


def _check_context(batch: Sequence[Conversation], limit: int | None) -> None:
    """Refuse what can never fit before it is sent; texts are counted by the server alone."""
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
