"""What a run shows while it goes on: a bar on a terminal, a line a batch elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pegahpc.bench.records import Record
from pegahpc.bench.run import Watcher


class ProgressBar(Watcher):
    """On standard error. Use as a context, so that the terminal is given back."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("[red]{task.fields[failed]}[/]"), console=self._console, transient=True
        )
        self._has_bar = sys.stderr.isatty()
        self._task = self._progress.add_task("starting", total=None, failed="")
        self._num_failed = 0

    def __enter__(self) -> ProgressBar:
        if self._has_bar:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_batch(self, what: str, num_requests: int) -> None:
        """A new bar."""
        if self._has_bar:
            self._progress.reset(self._task, description=what, total=num_requests)
        else:
            self._console.print(f"{what}: {num_requests} requests", markup=False, soft_wrap=True)

    def on_record(self, record: Record) -> None:
        """One more; failures are shown as they come."""
        self._num_failed += record.failure is not None
        self._progress.advance(self._task)
        if record.failure:
            self._progress.update(self._task, failed=f"{self._num_failed} failed, the last: {record.failure}")
