"""Ranks of one fleet as threads of one process: real engines over the fabric, each with a ledger of its exchanges."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engines import CLIENT, context, request, resolved

from pegahpc.engine.build import build_engine, slab_shape
from pegahpc.engine.loop import Engine
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.moe.fabric import FabricPort
from pegahpc.wire.messages import Abort, Sampling, Terminal, decode_outputs, encode

Kind = type[FabricDispatcher]


def thread_world(folder: Path, *overrides: str, kinds: list[Kind], timeout_s: float = 30.0) -> list[Engine]:
    """Connected and warmed up, in rank order; `timeout_s` bounds every exchange."""
    fleet = resolved(folder, *overrides, ep_size=len(kinds))
    ports = [FabricPort(rank, slab_shape(fleet)) for rank in range(len(kinds))]
    addresses = [port.address for port in ports]

    def build(rank: int) -> Engine:
        dispatcher = kinds[rank].connect(ports[rank], addresses, timeout_s=timeout_s)
        who = context(rank, len(kinds))
        return build_engine(fleet, who, dispatcher=dispatcher, progress=lambda stage, done: None)

    with ThreadPoolExecutor(len(kinds)) as pool:
        return list(pool.map(build, range(len(kinds)), timeout=60))


class Ledger:
    """Counts a rank's exchanges from one step's beginning to the next."""

    def __init__(self, engine: Engine) -> None:
        self.counts: list[int] = []
        self._dispatcher, self._begin_step = engine.dispatcher, engine.dispatcher.begin_step
        self._before = engine.dispatcher.num_exchanges
        self._is_first = True
        engine.dispatcher.begin_step = self._begin  # type: ignore[method-assign]

    def _begin(self, word: int) -> None:
        now = self._dispatcher.num_exchanges
        if not self._is_first:
            self.counts.append(now - self._before)
        self._before, self._is_first = now, False
        self._begin_step(word)


class MixedInbox:
    """A client who comes and goes: silent spells, long and short prompts, aborts at any time; all by one seed."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._draw, self._seen = engine, random.Random(seed), -1
        self._queue: list[bytes] = []
        self._open: list[str] = []
        self._quiet_until = 0
        self.num_asked = 0
        self.num_aborts = 0
        self.terminals: dict[str, list[Terminal]] = {}
        self.is_closed = False

    def receive(self) -> tuple[bytes, bytes] | None:
        step = self._engine.status.step
        if step != self._seen and not self.is_closed:
            self._seen = step
            self._think(step)
        return (CLIENT, self._queue.pop(0)) if self._queue else None

    def _think(self, step: int) -> None:
        draw = self._draw
        if step < self._quiet_until:
            return
        if draw.random() < 0.02:
            self._quiet_until = step + draw.randrange(1, 120)
        while draw.random() < 0.12:
            name = str(self.num_asked)
            self.num_asked += 1
            prompt = [draw.randrange(3, 300) for _ in range(draw.choice([1, 2, 7, 30, 90]))]
            sampling = Sampling(temperature=1.0, seed=self.num_asked)
            self._queue.append(encode(request(name, prompt, draw.choice([1, 2, 9, 40]), sampling)))
            self._open.append(name)
        if self._open and draw.random() < 0.03:
            self.num_aborts += 1
            self._queue.append(encode(Abort(self._open.pop(draw.randrange(len(self._open))))))

    def wait(self, timeout_ms: float, doorbells: list[int]) -> bool:
        return False

    def send(self, client: bytes, payload: bytes) -> None:
        for update in decode_outputs(payload).updates:
            if update.terminal is not None:
                self.terminals.setdefault(update.id, []).append(update.terminal)
                if update.id in self._open:
                    self._open.remove(update.id)


def run_threads(work: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    """All at once; what each raised."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures: list[Future[None]] = [pool.submit(each) for each in work]
        return [future.exception(timeout=110) for future in futures]
