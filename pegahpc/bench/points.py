"""Points of load: how requests are offered. A run measures several; each has a key that names it in the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pegahpc.config import ConfigError


@dataclass(frozen=True)
class Closed:
    """So many clients; each sends its next request when the last one has ended."""

    concurrency: int

    @property
    def key(self) -> str:
        """`c8`."""
        return f"c{self.concurrency}"


@dataclass(frozen=True)
class Open:
    """Requests come at their own times, however slow the answers are.

    Args:
        rate: conversations a second (a conversation is one request, unless there are more turns).
        shape: of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts, more is regular.
    """

    rate: float
    shape: float = 1.0

    @property
    def key(self) -> str:
        """`r4`, or `r4-g0.5` with gaps of shape 0.5."""
        return f"r{self.rate:g}" + ("" if self.shape == 1 else f"-g{self.shape:g}")

    def arrivals_s(self, rng: Random, num: int) -> list[float]:
        """`num` times after the start, ascending. The mean gap is 1 / rate whatever the shape."""
        arrivals, now_s = [], 0.0
        for _ in range(num):
            now_s += rng.gammavariate(self.shape, 1 / (self.rate * self.shape))
            arrivals.append(now_s)
        return arrivals


@dataclass(frozen=True)
class Replay:
    """A trace at the times that it says, `speed` times as fast."""

    speed: float = 1.0

    @property
    def key(self) -> str:
        """`trace`, or `trace-x2` at twice the speed."""
        return "trace" + ("" if self.speed == 1 else f"-x{self.speed:g}")


Point = Closed | Open | Replay


def make_points(
    concurrency: str | None, rate: str | None, *, shape: float, speed: float | None, has_trace: bool
) -> list[Point]:
    """The points that the options ask for: lists of numbers, `1,4,8`. Nothing asked: a trace's own times, or c8.

    Raises:
        ConfigError: a number that cannot be, a point twice, or an option without what it needs.
    """
    if shape <= 0:
        raise ConfigError(f"--gamma-shape: {shape:g} is not above 0")
    if shape != 1 and rate is None:
        raise ConfigError("--gamma-shape: shapes the gaps of --rate, which is not given")
    if speed is not None and (not has_trace or concurrency or rate or speed <= 0):
        raise ConfigError("--speed: a positive factor for the times of a --trace, without --concurrency or --rate")
    points: list[Point] = [Closed(int(number)) for number in _numbers("--concurrency", concurrency, is_whole=True)]
    points += [Open(number, shape) for number in _numbers("--rate", rate)]
    if not points:
        points = [Replay(speed or 1.0)] if has_trace else [Closed(8)]
    keys = [point.key for point in points]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"--concurrency, --rate: the point {twice} is there twice; for repeats there is --repeats")
    return points


def _numbers(option: str, text: str | None, *, is_whole: bool = False) -> Sequence[float]:
    numbers = []
    for part in text.split(",") if text else []:
        try:
            number = float(int(part) if is_whole else float(part))
        except ValueError:
            raise ConfigError(f"{option}: {part!r} is no number; write 1,4,8") from None
        if not 0 < number < float("inf"):
            raise ConfigError(f"{option}: {part} is not above 0 and finite")
        numbers.append(number)
    return numbers
