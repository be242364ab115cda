"""A rank's status block: written by its engine, published by another thread, read by its tray."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StatusBlock:
    """Forward progress of one rank. Fields are written one by one; a reader may see a step's fields half new."""

    step: int = 0
    exchange: int = 0
    phase: str = "boot"  # boot, idle, schedule, step, publish, stopped
    waiting_for: str = ""  # what or whom the rank waits for, "" for nothing
    num_running: int = 0
    num_waiting: int = 0
