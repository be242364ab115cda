"""Processes that someone has stopped: SIGSTOP, a debugger, a suspended shell. They die of nothing and say nothing."""

from __future__ import annotations

import time

from pegahpc.launch.identity import ProcessId

BOUND_SHARE = 0.6  # of gateway.stall_s, for all who stand still; the rest is for naming them and the teardown


class FreezeWatch:
    """Looks at one process of this machine, again and again; for callers that are sometimes held up themselves.

    Args:
        bound_s: how long it may be stopped.
    """

    def __init__(self, process: ProcessId, bound_s: float) -> None:
        self._process = process
        self._bound_s = bound_s
        self._since_s: float | None = None

    def is_over(self) -> bool:
        """Whether it was found stopped in every look of the last `bound_s`."""
        if not self._process.is_frozen():
            self._since_s = None
            return False
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s > self._bound_s
