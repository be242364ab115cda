"""A rank's status block: written by its engine, published by another thread, read by its tray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pegahpc.moe.dispatch import Dispatcher
from pegahpc.wire.messages import PhaseTimes


@dataclass
class StatusBlock:
    """Forward progress of one rank. Fields are written one by one; a reader may see a step's fields half new."""

    dispatcher: Dispatcher
    phases: Callable[[], PhaseTimes]  # where the loop's time went so far
    step: int = 0
    phase: str = "boot"  # boot, idle, schedule, step, publish, stopped
    num_running: int = 0
    num_waiting: int = 0

    @property
    def exchange(self) -> int:
        """Exchanges that are complete, over all steps."""
        return self.dispatcher.num_exchanges

    @property
    def waiting_for(self) -> str:
        """Whom an exchange under way waits for, "" for nobody."""
        return self.dispatcher.waiting_for
