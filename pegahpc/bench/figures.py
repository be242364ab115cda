"""From records to figures: percentiles, rates, goodput, and what went wrong. Pure: a result can be derived again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import fmean

import msgspec
import numpy as np

from pegahpc.bench.records import Record
from pegahpc.config import ConfigError

LIMITED = ("ttft", "tpot", "e2e")
UNITS_MS = {"ms": 1.0, "s": 1000.0}


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution, in milliseconds. Percentiles interpolate linearly (R-7)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat of one point. Times and rates are those of requests that succeeded, over the whole duration.

    Args:
        ttft_ms, e2e_ms: first token, end of the stream; from when the request was due.
        tpot_ms: of each request, the mean time of a token after its first. None if of one request it is not known how
            many tokens came when (`num_uncounted`).
        itl_ms: all times between two tokens. None if in one stream tokens came bundled (`num_bundled`), or uncounted;
            then stream_chunk_gap_ms, between two pieces of a stream, stands in its place. It is always there, so that
            repeats of which some are bundled have it in common.
        send_lag_ms: how late the client itself was.
        failures: number by reason.
        unexplained_cached_tokens: prompt tokens that the server had in its cache, though nothing in this run put them
            there; None where that cannot be counted.
        goodput_per_s: requests a second within all limits; None without limits, or where one of them is not known.
    """

    duration_s: float
    num_requests: int
    num_succeeded: int
    failures: dict[str, int]
    num_uncounted: int
    num_bundled: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    unexplained_cached_tokens: int | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s_per_device: float | None
    output_tokens_per_s_per_device: float | None
    goodput_per_s: float | None
    goodput_share: float | None
    ttft_ms: Stats | None
    tpot_ms: Stats | None
    itl_ms: Stats | None
    stream_chunk_gap_ms: Stats | None
    e2e_ms: Stats | None
    send_lag_ms: Stats | None
    outputs_sha256: str


@dataclass(frozen=True)
class Limits:
    """A service level: milliseconds by name, of `ttft`, `tpot` and `e2e`."""

    text: str
    limits_ms: dict[str, float]

    def verdict(self, record: Record) -> bool | None:
        """Whether a request that succeeded is within all limits; None: one of its times is not known."""
        times = {"ttft": record.ttft_ms, "tpot": record.tpot_ms, "e2e": record.e2e_ms}
        if record.tokens_each is not None and record.tpot_ms is None:
            times["tpot"] = 0.0  # no token came later than the first
        found = [(times[name], limit_ms) for name, limit_ms in self.limits_ms.items()]
        if any(time_ms is not None and time_ms > limit_ms for time_ms, limit_ms in found):
            return False
        return None if any(time_ms is None for time_ms, _ in found) else True


def parse_limits(text: str | None) -> Limits | None:
    """Read `ttft=500ms,tpot=50ms,e2e=2s`.

    Raises:
        ConfigError: another name, or no time with a unit.
    """
    if not text:
        return None
    limits_ms: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        unit = value.lstrip("0123456789.")
        try:
            limits_ms[name] = float(value.removesuffix(unit)) * UNITS_MS[unit]
        except (ValueError, KeyError):
            raise ConfigError(f"--slo: {part!r} is no limit; write ttft=500ms,tpot=50ms,e2e=2s") from None
        if name not in LIMITED:
            raise ConfigError(f"--slo: {name!r} is none of {', '.join(LIMITED)}")
    return Limits(text, limits_ms)


def stats(values: Sequence[float]) -> Stats | None:
    """The distribution of some values; None of none. Source: R-7 of Hyndman and Fan (1996), numpy's "linear"."""
    if not values:
        return None
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99), method="linear").tolist()
    found = {"mean": fmean(values), "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": max(values)}
    return Stats(count=len(values), **{name: round(value, 4) for name, value in found.items()})


def figures(records: Sequence[Record], *, limits: Limits | None, num_devices: int | None) -> Figures:
    """The figures of one repeat.

    Args:
        num_devices: of the whole fleet, all of them; None: not known, and then no figure a device.
    """
    good = [record for record in records if record.failure is None]
    duration_s = _duration_s(records)
    num_input, num_output = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    num_uncounted = sum(record.tokens_each is None for record in good)
    num_bundled = sum(not record.has_token_times for record in good) - num_uncounted
    has_token_times = not num_uncounted and not num_bundled
    gaps_ms = [gap for record in good for gap in record.gaps_ms]
    goodput = _num_within(good, limits)

    def rate(amount: float) -> float:
        return round(amount / duration_s, 4) if duration_s else 0.0

    def per_device(amount: float) -> float | None:
        return rate(amount / num_devices) if num_devices else None

    return Figures(
        duration_s=round(duration_s, 6),
        num_requests=len(records),
        num_succeeded=len(good),
        failures=dict(sorted(Counter(r.failure for r in records if r.failure is not None).items())),
        num_uncounted=num_uncounted,
        num_bundled=num_bundled,
        input_tokens=num_input,
        output_tokens=num_output,
        cached_tokens=_sum_or_none([record.cached_tokens for record in good]),
        unexplained_cached_tokens=_sum_or_none([_unexplained(record) for record in good]),
        requests_per_s=rate(len(good)),
        input_tokens_per_s=rate(num_input),
        output_tokens_per_s=rate(num_output),
        input_tokens_per_s_per_device=per_device(num_input),
        output_tokens_per_s_per_device=per_device(num_output),
        goodput_per_s=None if goodput is None else rate(goodput),
        goodput_share=None if goodput is None else round(goodput / len(records), 6),
        ttft_ms=stats([record.ttft_ms for record in good]),
        tpot_ms=None if num_uncounted else stats([r.tpot_ms for r in good if r.tpot_ms is not None]),
        itl_ms=stats(gaps_ms) if has_token_times else None,
        stream_chunk_gap_ms=stats(gaps_ms),
        e2e_ms=stats([record.e2e_ms for record in good]),
        send_lag_ms=stats([record.sent_ms - record.due_ms for record in records]),
        outputs_sha256=sha256("".join(r.output_sha256 for r in records).encode()).hexdigest()[:16],
    )


def _duration_s(records: Sequence[Record]) -> float:
    """From the first request that was due to the last one's end, failures included: time passed for them, too."""
    if not records:
        return 0.0
    return (max(record.ended_ms for record in records) - min(record.due_ms for record in records)) / 1e3


def _num_within(good: Sequence[Record], limits: Limits | None) -> int | None:
    if limits is None:
        return None
    verdicts = [limits.verdict(record) for record in good]
    return None if None in verdicts else sum(verdict is True for verdict in verdicts)


def _unexplained(record: Record) -> int | None:
    if record.cached_tokens is None or record.reusable_tokens is None:
        return None
    return max(record.cached_tokens - record.reusable_tokens, 0)


def _sum_or_none(counts: Sequence[int | None]) -> int | None:
    """The sum, if all are known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
