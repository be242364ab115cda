"""What a user may say of a run, and what follows from it before anything is asked."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pegahpc.bench.lengths import parse_lengths
from pegahpc.bench.points import Point, make_points
from pegahpc.bench.prompts import Form
from pegahpc.bench.trace import Trace, read_trace
from pegahpc.bench.workload import WorkloadSpec
from pegahpc.config import ConfigError

FORMS: tuple[Form, ...] = ("tokens", "text", "chat")
PREFIX = re.compile(r"(\d+)(?:x(\d+))?")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `pegahpc bench run`, as they are written there."""

    input_tokens: str = "128"
    output_tokens: str = "64"
    num_requests: int | None = None
    concurrency: str | None = None
    rate: str | None = None
    gamma_shape: float = 1.0
    trace: Path | None = None
    speed: float | None = None
    turns: int = 1
    think_s: float = 0.0
    shared_prefix: str = "0"
    prompts: str = "auto"
    vocab_size: int | None = None
    temperature: float = 0.0
    stop_at_eos: bool = False
    repeats: int = 3
    warmup: int = 4
    seed: int = 0
    slo: str | None = None
    timeout_s: float = 240.0
    stall_s: float = 60.0
    max_failures: float = 0.0
    allow_identical_prompts: bool = False
    num_gpus: int | None = None
    labels: Sequence[str] = ()
    output: Path | None = None
    plot: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("--repeats", self.repeats >= 1, "at least 1"),
            ("--warmup", self.warmup >= 0, "not negative"),
            ("--temperature", 0 <= self.temperature < math.inf, "finite and not negative"),
            ("--timeout", self.timeout_s > 0, "above 0"),
            ("--stall", self.stall_s > 0, "above 0"),
            ("--max-failures", 0 <= self.max_failures < 1, "a share in [0, 1)"),
            ("--num-gpus", self.num_gpus is None or self.num_gpus >= 1, "at least 1"),
            ("--vocab-size", self.vocab_size is None or self.vocab_size >= 2, "at least 2"),
            ("--prompts", self.prompts in ("auto", *FORMS), f"auto, {', '.join(FORMS)}"),
        )
        for option, is_good, must_be in checks:
            if not is_good:
                raise ConfigError(f"{option}: must be {must_be}")

    def label_values(self) -> dict[str, str]:
        """The labels by key.

        Raises:
            ConfigError: one is no key=value.
        """
        pairs = [label.partition("=") for label in self.labels]
        if wrong := next((key for key, sep, value in pairs if not (key and sep and value)), None):
            raise ConfigError(f"--label: {wrong!r} has no value; write key=value")
        return {key: value for key, _, value in pairs}

    def points(self) -> list[Point]:
        """The points of load."""
        return make_points(
            self.concurrency,
            self.rate,
            shape=self.gamma_shape,
            speed=self.speed,
            has_trace=self.trace is not None,
        )

    def read_trace(self) -> Trace | None:
        """The trace, if there is one."""
        return None if self.trace is None else read_trace(self.trace)

    def workload(self, trace: Trace | None, *, allows_twins: bool) -> WorkloadSpec:
        """What is to be asked."""
        found = PREFIX.fullmatch(self.shared_prefix)
        if found is None:
            raise ConfigError(
                f"--shared-prefix: {self.shared_prefix!r} is no length; write 256, or 256x4 for 4 of them"
            )
        return WorkloadSpec(
            seed=self.seed,
            num_requests=self.num_requests if self.num_requests is not None else (0 if trace else 64),
            input_tokens=parse_lengths("--input-tokens", self.input_tokens),
            output_tokens=parse_lengths("--output-tokens", self.output_tokens),
            shared_prefix=int(found[1]),
            num_prefixes=int(found[2] or 1),
            num_turns=self.turns,
            think_s=self.think_s,
            trace=trace,
            allows_twins=allows_twins,
        )

    def output_path(self) -> Path:
        """Where the result goes, a place that can be written; checked before anything is measured.

        Raises:
            ConfigError: it cannot be written, or plots are wanted and matplotlib is not there.
        """
        if self.plot:
            check_plots()
        default = f"pegahpc-bench-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path = (self.output or Path(default)).absolute()
        if path.suffix != ".json":
            raise ConfigError(f"--output: {path.name} must end in .json; the raw requests go beside it")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"--output: {path.parent} is no folder that can be written")
        return path


def check_plots() -> None:
    """Plots need an extra.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: needs matplotlib; install it with: pip install 'pegahpc[bench]'")


def choose_form(wanted: str, *, trace: Trace | None, num_turns: int, knows_vocabulary: bool, is_http: bool) -> Form:
    """In which form prompts are sent. auto: token ids where they are known; conversations over HTTP as chats.

    Raises:
        ConfigError: the form does not fit the target or the trace.
    """
    given = trace.prompts[:1] if trace else []
    of_trace: Form | None = None if not given else "tokens" if isinstance(given[0], list) else "text"
    if wanted == "auto":
        fits: Form = "chat" if num_turns > 1 else "tokens" if knows_vocabulary else "text"
        form: Form = of_trace or (fits if is_http else "tokens")
    else:
        form = next(known for known in FORMS if known == wanted)
    if not is_http and form != "tokens":
        raise ConfigError(f"--prompts: {form} needs the text of HTTP; --engine and --wire take token ids")
    if is_http and form == "tokens" and num_turns > 1:
        raise ConfigError("--prompts: over HTTP answers are text, so the turns of a conversation are text or chat")
    if of_trace and (of_trace == "tokens") != (form == "tokens"):
        raise ConfigError(f"--prompts: the trace has prompts of the form {of_trace}, not {form}")
    return form
