"""What was lost, and which of several losses is the cause."""

from __future__ import annotations

import asyncio

from pegahpc.launch.messages import REFUSAL, Loss
from pegahpc.launch.record import FleetRecord

# A rank that is killed makes its peers fail within milliseconds, and their word may come first.
GRACE_S = 0.3


class Losses:
    """Collects losses; the heaviest of those that arrive together is the culprit."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []
        self._has_come = asyncio.Event()

    def add(self, loss: Loss) -> None:
        """Take in one."""
        self._losses.append(loss)
        self._has_come.set()

    async def culprit(self) -> Loss:
        """Wait for a loss, then a moment longer for a better one."""
        await self._has_come.wait()
        await asyncio.sleep(GRACE_S)
        return max(self._losses, key=lambda loss: loss.weight)  # of equals the first


def describe(loss: Loss, record: FleetRecord) -> str:
    """A loss in one line; what a user can mend comes first."""
    if loss.rank is None:
        return loss.reason
    entry = record.ranks[loss.rank]
    if loss.weight == REFUSAL:
        return f"{loss.reason} (rank {loss.rank}; log: {entry.log})"
    pid = loss.pid or (entry.process.pid if entry.process else 0)
    who = f"rank {loss.rank} (tray {entry.tray}, host {entry.host or record.host}, pid {pid})"
    when = f"step {entry.step}" if entry.stage == "ready" else f"stage {entry.stage}"
    return f"{who} {loss.reason}; last seen at {when}; log: {entry.log}"
