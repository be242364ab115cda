"""Distributions of token counts, as users write them: `128`, `lognormal:mean=512,sigma=0.6,max=2048`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from pegahpc.config import ConfigError

# Kind -> (what it needs, what it may have). Values that are drawn outside of min and max become min and max.
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "constant": (("value",), ()),
    "uniform": (("low", "high"), ()),
    "lognormal": (("mean", "sigma"), ("min", "max")),
    "geometric": (("mean",), ("min", "max")),
}


@dataclass(frozen=True)
class Lengths:
    """One distribution over whole numbers from 1 up.

    Args:
        text: as the user wrote it; it goes into the result.
        draw_real: one draw, before rounding and bounds.
    """

    text: str
    draw_real: Callable[[Random], float]
    low: int = 1
    high: int | None = None

    def draw(self, rng: Random) -> int:
        """One length."""
        length = max(round(self.draw_real(rng)), self.low)
        return length if self.high is None else min(length, self.high)


def parse_lengths(option: str, text: str) -> Lengths:
    """Read a distribution.

    Raises:
        ConfigError: naming `option` and what would be right.
    """
    kind, values = _read(option, text)
    low, high = round(values.get("min", 1)), round(values["max"]) if "max" in values else None
    if min(low, values.get("low", 1), values.get("mean", 1), values.get("value", 1)) < 1:
        raise ConfigError(f"{option}: {text!r}: lengths and their mean are 1 or more")
    if (high is not None and high < low) or values.get("high", math.inf) < values.get("low", 0):
        raise ConfigError(f"{option}: {text!r}: the upper bound is below the lower one")
    if kind == "lognormal" and values["sigma"] < 0:
        raise ConfigError(f"{option}: {text!r}: sigma is negative")
    return Lengths(text, _drawing(kind, values), low, high)


def _read(option: str, text: str) -> tuple[str, dict[str, float]]:
    kind, has_kind, rest = text.partition(":")
    if not has_kind:
        kind, rest = "constant", f"value={text}"
    if kind not in KINDS:
        raise ConfigError(f"{option}: {kind!r} is none of {', '.join(KINDS)}; a plain number is constant")
    needed, optional = KINDS[kind]
    values: dict[str, float] = {}
    for part in rest.split(","):
        name, _, value = part.partition("=")
        if name not in needed + optional:
            raise ConfigError(f"{option}: {text!r}: {kind} takes {', '.join(needed + optional)}, not {name!r}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"{option}: {text!r}: {value!r} is no number") from None
        if not math.isfinite(values[name]):
            raise ConfigError(f"{option}: {text!r}: {name} is not finite")
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(f"{option}: {text!r}: {kind} needs {', '.join(missing)}")
    return kind, values


def _drawing(kind: str, values: dict[str, float]) -> Callable[[Random], float]:
    if kind == "constant":
        return lambda rng: values["value"]
    if kind == "uniform":
        return lambda rng: rng.randint(round(values["low"]), round(values["high"]))
    if kind == "lognormal":
        sigma = values["sigma"]
        mu = math.log(values["mean"]) - sigma**2 / 2  # so that the mean is the mean, before bounds
        return lambda rng: rng.lognormvariate(mu, sigma)
    return lambda rng: _geometric(rng, values["mean"])


def _geometric(rng: Random, mean: float) -> float:
    """Trials to the first success of probability 1 / mean, by inversion."""
    return 1.0 if mean == 1 else math.ceil(math.log(1.0 - rng.random()) / math.log1p(-1.0 / mean)) or 1.0
