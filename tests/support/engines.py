"""One rank's real engine in a test: built from a checkpoint, driven without sockets."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import torch

from pegahpc.config import FleetConfig, compose_fleet
from pegahpc.engine.build import build_engine
from pegahpc.engine.loop import Engine
from pegahpc.engine.request_cache import RequestCache
from pegahpc.engine.sequence import Sequence, Span
from pegahpc.moe.dispatch import Dispatcher, LocalDispatcher
from pegahpc.plan import resolve
from pegahpc.rank import RankContext
from pegahpc.wire.messages import Request, RequestUpdate, Sampling, Terminal

CLIENT = b"test"
GREEDY = Sampling(temperature=0.0)


def resolved(folder: Path, *overrides: str, ep_size: int = 1) -> FleetConfig:
    """A resolved configuration for a checkpoint folder."""
    given = ["model=checkpoint", f"model.path={folder}", "model.name=test", "model.max_model_len=512",
             "engine.page_tokens=16", "engine.cache_tokens=8192", "cluster.device=cpu",
             f"topology=ep{ep_size}"]  # fmt: skip
    return resolve(compose_fleet([*given, *overrides])).fleet


def context(rank: int = 0, world_size: int = 1) -> RankContext:
    """A rank of a one-tray world."""
    return RankContext(
        rank=rank, world_size=world_size, tray=0, num_trays=1, local_rank=rank, device="cpu", bind_host="127.0.0.1"
    )


def build(folder: Path, *overrides: str, num_experts: int = 8) -> Engine:
    """An EP1 engine."""
    dispatcher: Dispatcher = LocalDispatcher(num_experts)
    fleet = resolved(folder, *overrides)
    return build_engine(fleet, context(), dispatcher=dispatcher, progress=lambda stage, done: None)


def request(
    name: str, prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY, stop: tuple[int, ...] = ()
) -> Request:
    """A request as the gateway would send it."""
    return Request(id=name, prompt_tokens=prompt, max_tokens=max_tokens, sampling=sampling, stop_token_ids=stop)


def record_logits(engine: Engine) -> list[str]:
    """From now on, a digest of the logits' bytes of each row that is sampled, in order."""
    digests: list[str] = []
    decoder = engine.runner.decoder
    logits_of = decoder.logits

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        digests.append(blake2b(logits[0].numpy().tobytes()).hexdigest())
        return logits

    setattr(decoder, "logits", recording)  # noqa: B010 (the type checker forbids the plain form)
    return digests


class Collected:
    """What an engine said, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.terminals: dict[str, Terminal] = {}
        self.updates: list[RequestUpdate] = []

    def take(self, engine: Engine) -> None:
        """Empty the engine's outbox."""
        for update in engine.outbox.take().get(CLIENT, []):
            self.updates.append(update)
            self.tokens.setdefault(update.id, []).extend(update.tokens)
            if update.terminal is not None:
                assert update.id not in self.terminals, f"{update.id} has two terminals"
                self.terminals[update.id] = update.terminal


def run(engine: Engine, requests: Iterable[Request]) -> Collected:
    """Submit all at once and step until nothing is left."""
    collected = Collected()
    for each in requests:
        engine.submit(CLIENT, each)
    while engine.scheduler.has_work:
        engine.step()
        collected.take(engine)
    collected.take(engine)
    return collected


def logits_by_chunks(engine: Engine, sequences: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
    """Teacher-forced logits of every position: all sequences advance together, by chunks[0], chunks[1], ... rows.

    The last chunk size repeats. Returns [num_tokens, vocab] for each sequence.
    """
    running = [admit(engine, str(i), tokens) for i, tokens in enumerate(sequences)]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    sizes = iter(chunks)
    size = next(sizes)
    while any(sequence.num_remaining for sequence in running):
        spans = [Span(s, s.num_computed, min(size, s.num_remaining)) for s in running if s.num_remaining]
        spans.sort(key=lambda span: span.num_rows == 1)  # chunks before single rows, as the scheduler plans
        hidden = engine.runner.forward(spans)
        logits = engine.runner.decoder.logits(hidden)
        row = 0
        for span in spans:
            assert span.sequence.cache is not None
            parts[running.index(span.sequence)].append(logits[row : row + span.num_rows].clone())
            span.sequence.cache.commit(span.num_rows)
            row += span.num_rows
        size = next(sizes, size)
    for sequence in running:
        assert sequence.cache is not None
        sequence.cache.drop()
    return [torch.cat(part) for part in parts]


def admit(engine: Engine, name: str, tokens: list[int]) -> Sequence:
    """A sequence with its pages, outside the scheduler."""
    sequence = Sequence(CLIENT, request(name, tokens, 0), 0.0)
    sequence.cache, sequence.slot = RequestCache(engine.scheduler.pool), int(name)
    assert sequence.cache.reserve(len(tokens))
    sequence.cache.extend(len(tokens))
    engine.runner.admit(sequence)
    return sequence
