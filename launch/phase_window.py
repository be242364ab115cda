"""Where a rank's time went in the last seconds, from totals since its start."""

from __future__ import annotations

from collections import deque

import msgspec

from pegahpc.wire.messages import PhaseTimes

WINDOW_S = 10.0
SHARES = ("schedule", "forward", "exchange", "sample", "publish", "idle")


class PhaseWindow:
    """One rank's totals over a sliding window."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, PhaseTimes]] = deque()

    def add(self, now_s: float, total: PhaseTimes) -> PhaseTimes:
        """Take in the newest totals; what was added to them within the window."""
        self._totals.append((now_s, total))
        while now_s - self._totals[0][0] > WINDOW_S:
            self._totals.popleft()
        return _difference(total, self._totals[0][1])


def shares(times: PhaseTimes) -> dict[str, float]:
    """Each phase's share of all of them; what exchanges take of forward counts as exchange only. All 0 without time."""
    seconds = {name: getattr(times, f"{name}_s") for name in SHARES}
    seconds["forward"] = max(
        seconds["forward"] - seconds["exchange"], 0.0
    )  # a step under way counts its exchanges first
    whole_s = sum(seconds.values())
    return {name: round(seconds_in / whole_s, 4) if whole_s > 0 else 0.0 for name, seconds_in in seconds.items()}


def _difference(later: PhaseTimes, earlier: PhaseTimes) -> PhaseTimes:
    before = msgspec.structs.asdict(earlier)
    return PhaseTimes(**{name: seconds - before[name] for name, seconds in msgspec.structs.asdict(later).items()})
