"""From a seed to every request of a run: who asks what, when, and how long an answer is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from random import Random

import msgspec

from pegahpc.bench.lengths import Lengths
from pegahpc.bench.points import Open, Point, Replay
from pegahpc.bench.prompts import Material, NoTwoAlike, Prompt, join
from pegahpc.bench.trace import Trace
from pegahpc.config import ConfigError


class Turn(msgspec.Struct, frozen=True):
    """What is new in one request of a conversation; the history before it is the driver's to keep."""

    prompt: Prompt
    output_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """Requests that come one after the other, most often just one.

    Args:
        at_s: when it begins, after the start; 0 in the closed loop.
        reusable_tokens: of its first prompt, those that others of this run may have left in a prefix cache, because
            the workload shares them; None where they cannot be counted (texts).
    """

    idx: int
    at_s: float
    turns: list[Turn]
    reusable_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """What the user asked for.

    Args:
        num_requests: of each point and repeat; with a trace, at most so many of its lines (0: all).
        shared_prefix: tokens before the prompts of a group; groups are `num_prefixes` and take turns.
        think_s: between an answer and the next turn.
    """

    seed: int
    num_requests: int
    input_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    think_s: float = 0.0
    trace: Trace | None = None
    allows_twins: bool = False

    def __post_init__(self) -> None:
        if self.num_requests < (0 if self.trace else 1):
            raise ConfigError(f"--num-requests: {self.num_requests} is too few")
        if self.num_turns < 1 or self.num_requests % self.num_turns:
            raise ConfigError(f"--turns: {self.num_turns} turns do not divide {self.num_requests} requests")
        if self.shared_prefix < 0 or self.num_prefixes < 1:
            raise ConfigError("--shared-prefix: a length is not negative, and there is at least one group")
        if not 0 <= self.think_s < math.inf:
            raise ConfigError(f"--think: {self.think_s:g} is no time")
        if self.think_s and self.num_turns == 1:
            raise ConfigError("--think: is the time between --turns, of which there is one")
        if self.trace and (self.num_turns > 1 or self.shared_prefix):
            raise ConfigError("--trace: has prompts of its own; leave --turns and --shared-prefix out")

    def check_batches(self, num: int) -> None:
        """So many batches (points times repeats) are going to be drawn; a trace's own prompts can be asked once.

        Raises:
            ConfigError: they would be asked again.
        """
        lines = self.trace.lines[: self.num_requests or None] if self.trace else []
        if num > 1 and not self.allows_twins and any(line.prompt is not None for line in lines):
            raise ConfigError(
                "--trace: has prompts, which can be asked once: say --repeats 1 and one point, or"
                " --allow-identical-prompts, which marks the result as not comparable"
            )


class Workload:
    """Draws the requests of each point and repeat. Lengths and arrivals are the same in each, prompts never.

    Fresh prompts keep a prefix cache from answering for the model; equal lengths and arrivals leave the machine's own
    noise as the only thing that repeats differ by.
    """

    def __init__(self, spec: WorkloadSpec, material: Material) -> None:
        self.spec = spec
        self._material = material
        self._watch = NoTwoAlike(allows_twins=spec.allows_twins)

    @property
    def num_twins(self) -> int:
        """Prompts that were there before, in all that was drawn so far."""
        return self._watch.num_twins

    def batch(self, point: Point, repeat: int) -> list[Conversation]:
        """All conversations of one repeat of a point, in the order of their beginnings.

        Raises:
            ConfigError: prompts would be identical.
        """
        rng = Random(f"{self.spec.seed} {point.key} {repeat}")
        lengths = Random(f"{self.spec.seed} lengths")
        asked = self._of_trace(rng, lengths) if self.spec.trace else self._drawn(rng, lengths)
        times_s = self._arrivals_s(point, len(asked))
        return [
            Conversation(idx, at_s, turns, reusable)
            for idx, (at_s, (turns, reusable)) in enumerate(zip(times_s, asked, strict=True))
        ]

    def warmup(self, point: Point, num_requests: int) -> list[Conversation]:
        """Requests that are not counted, like those of the point but alone."""
        rng, lengths = Random(f"{self.spec.seed} {point.key} warmup"), Random(f"{self.spec.seed} lengths")
        turns = [self._turn(rng, lengths) for _ in range(num_requests)]
        return [Conversation(idx, 0.0, [turn], None) for idx, turn in enumerate(turns)]

    def _drawn(self, rng: Random, lengths: Random) -> list[tuple[list[Turn], int | None]]:
        spec = self.spec
        prefixes = [self._material.draw(rng, spec.shared_prefix) for _ in range(spec.num_prefixes)]
        is_counted = self._material.form == "tokens" or not spec.shared_prefix
        reusable = spec.shared_prefix if is_counted else None
        asked = []
        for idx in range(spec.num_requests // spec.num_turns):
            prefix = prefixes[idx % spec.num_prefixes]
            turns = [self._turn(rng, lengths, None if number else prefix) for number in range(spec.num_turns)]
            asked.append((turns, reusable))
        return asked

    def _turn(self, rng: Random, lengths: Random, prefix: Prompt | None = None) -> Turn:
        num_input, num_output = self.spec.input_tokens.draw(lengths), self.spec.output_tokens.draw(lengths)
        return Turn(self._fresh(rng, num_input, prefix), num_output)

    def _fresh(self, rng: Random, length: int, prefix: Prompt | None = None) -> Prompt:
        def draw() -> Prompt:
            piece = self._material.draw(rng, length)
            return join(prefix, piece) if prefix else piece

        return self._watch.drawn(draw, what=f"{length} tokens")

    def _of_trace(self, rng: Random, lengths: Random) -> list[tuple[list[Turn], int | None]]:
        assert self.spec.trace is not None
        lines = self.spec.trace.lines[: self.spec.num_requests or None]
        shared = shared_tokens(self.spec.trace.prompts)
        asked: list[tuple[list[Turn], int | None]] = []
        for line in lines:
            num_output = line.output_tokens or self.spec.output_tokens.draw(lengths)
            prompt = line.prompt
            if prompt is None:
                assert line.input_tokens is not None
                asked.append(([Turn(self._fresh(rng, line.input_tokens), num_output)], 0))
            else:
                self._watch.given(prompt, where=f"--trace: {self.spec.trace.name}")
                asked.append(([Turn(prompt, num_output)], shared if isinstance(prompt, list) else None))
        return asked

    def _arrivals_s(self, point: Point, num: int) -> Sequence[float]:
        if isinstance(point, Open):
            return point.arrivals_s(Random(f"{self.spec.seed} arrivals"), num)
        if isinstance(point, Replay):
            assert self.spec.trace is not None
            return [line.timestamp / point.speed for line in self.spec.trace.lines[:num]]
        return [0.0] * num


def shared_tokens(prompts: Sequence[Prompt]) -> int:
    """The longest beginning that two of these prompts have in common."""
    ordered = sorted(prompt for prompt in prompts if isinstance(prompt, list))
    return max((_common(a, b) for a, b in pairwise(ordered)), default=0)


def _common(a: list[int], b: list[int]) -> int:
    return next((idx for idx, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def batch_sha256(conversations: Sequence[Conversation]) -> str:
    """What was asked, when, in 16 hex digits: equal for equal workloads only."""
    return sha256(msgspec.msgpack.encode(list(conversations))).hexdigest()[:16]
