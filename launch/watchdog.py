"""Which rank is to blame when a fleet stands still. Progress, not existence, is health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pegahpc.launch.messages import HEARTBEAT_S, Pulse

QUIET_S = 4 * HEARTBEAT_S


@dataclass
class Vital:
    """What is known of one rank; times are the head's monotonic clock."""

    pulse: Pulse
    heard_s: float  # when the newest status block was made
    advanced_s: float  # when its step last moved


class Watchdog:
    """Judges the ranks' status blocks against one bound.

    Args:
        bound_s: how long a rank may be silent, or all may be at the same step.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._vitals: dict[int, Vital] = {}
        self._trays_heard_s: dict[int, float] = {}

    def expect_tray(self, tray: int, now_s: float) -> None:
        """From now on at the latest this tray speaks."""
        self._trays_heard_s.setdefault(tray, now_s)

    def expect_ranks(self, world_size: int, now_s: float) -> None:
        """From now on ranks move; that one has waited for the others, speaking, was no fault."""
        for rank in range(world_size):
            known = self._vitals.get(rank) or Vital(Pulse(rank=rank), heard_s=now_s, advanced_s=now_s)
            self._vitals[rank] = replace(known, advanced_s=now_s)

    def note(self, pulse: Pulse, now_s: float) -> None:
        """Take in one status block."""
        heard_s = now_s - pulse.age_s
        known = self._vitals.get(pulse.rank)
        has_moved = known is None or known.pulse.step != pulse.step or known.pulse.exchange != pulse.exchange
        self._vitals[pulse.rank] = Vital(pulse, heard_s, now_s if known is None or has_moved else known.advanced_s)

    def note_tray(self, tray: int, now_s: float) -> None:
        """A tray has spoken."""
        self._trays_heard_s[tray] = now_s

    def silent_tray(self, now_s: float) -> tuple[int, str] | None:
        """(tray, reason) of a tray process that is frozen; its ranks are silent only because it is."""
        for tray, heard_s in self._trays_heard_s.items():
            if now_s - heard_s > self._bound_s:
                return tray, f"has been silent for {now_s - heard_s:.1f} s"
        return None

    def verdict(self, now_s: float) -> tuple[int, str] | None:
        """(rank, reason) of the culprit, or None while all is well.

        A silent rank is frozen. Where all speak and one does not move, the culprit is a rank that waits for nobody.
        """
        silent = [vital for vital in self._vitals.values() if now_s - vital.heard_s > self._bound_s]
        if silent and self._trays_of(silent) & self.quiet_trays(now_s):
            return None  # the tray is to be judged, as soon as its own bound is over
        if silent:
            worst = min(silent, key=lambda vital: vital.heard_s)
            return worst.pulse.rank, f"has been silent for {now_s - worst.heard_s:.1f} s{_last(worst.pulse)}"
        if all(now_s - vital.advanced_s <= self._bound_s for vital in self._vitals.values()):
            return None
        # those whom it holds up stopped a moment before or after it: judge all that stand still
        stuck = [vital for vital in self._vitals.values() if now_s - vital.advanced_s > self._bound_s / 2]
        worst = min(stuck, key=lambda vital: (bool(vital.pulse.waiting_for), vital.pulse.step, vital.pulse.exchange))
        return worst.pulse.rank, f"has not moved for {now_s - worst.advanced_s:.1f} s{_last(worst.pulse)}"

    def _trays_of(self, vitals: Sequence[Vital]) -> set[int]:
        ranks_per_tray = len(self._vitals) // max(len(self._trays_heard_s), 1)
        return {vital.pulse.rank // ranks_per_tray for vital in vitals}

    def quiet_trays(self, now_s: float) -> set[int]:
        """Trays that have missed a few heartbeats: of their ranks nothing is known, and they may not hear either."""
        return {tray for tray, heard_s in self._trays_heard_s.items() if now_s - heard_s > QUIET_S}


def _last(pulse: Pulse) -> str:
    waits = f", waiting for {pulse.waiting_for}" if pulse.waiting_for else ""
    return f" (step {pulse.step}, exchange {pulse.exchange}, phase {pulse.phase or 'unknown'}{waits})"
