"""One rank of a measured world: its jobs as JSON lines on standard input, what it measured on standard output."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from pegahpc.config import compose_fleet
from pegahpc.engine.build import build_engine, slab_shape
from pegahpc.engine.loop import Engine
from pegahpc.moe.collectives_torch import TorchCollectives
from pegahpc.moe.dispatch import Dispatcher, LocalDispatcher
from pegahpc.moe.dispatch_collective import CollectiveDispatcher
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.moe.fabric import FabricPort
from pegahpc.plan import Plan, resolve
from pegahpc.rank import RankContext
from pegahpc.wire.messages import Request, Sampling, decode_outputs, encode

TIMEOUT_S = 60.0


def say(document: object) -> None:
    """One line for whoever started this rank."""
    print(json.dumps(document), flush=True)


def hear() -> Any:
    """The next line."""
    return json.loads(sys.stdin.readline())


def gloo(rank: int, world_size: int) -> TorchCollectives:
    """A gloo world; rank 0 says where its store listens."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    say(store.port if store else 0)
    port = hear()[0]
    return TorchCollectives(store or TCPStore("127.0.0.1", port), rank=rank, world_size=world_size, timeout_s=TIMEOUT_S)


def fabric(rank: int, plan: Plan) -> Dispatcher:
    """A fabric world; every rank says where its slab is to be had."""
    port = FabricPort(rank, slab_shape(plan.fleet))
    say(port.address)
    return FabricDispatcher.connect(port, hear(), timeout_s=TIMEOUT_S)


def measure_exchange(job: dict[str, Any], plan: Plan) -> None:
    """Microseconds an exchange of num_bytes a rank, spread evenly over all: fabric, then gloo, in turn."""
    rank, world_size = job["rank"], plan.fleet.topology.world_size
    one_sided = fabric(rank, plan)
    collectives = gloo(rank, world_size)
    portable = CollectiveDispatcher(collectives, num_experts=plan.num_experts)
    hidden = slab_shape(plan.fleet).hidden
    rows = torch.randn(job["num_bytes"] // (4 * hidden), hidden)
    idx = torch.arange(rows.shape[0]).view(-1, 1) % plan.num_experts
    share = [rows.shape[0] // world_size] * world_size

    def layer(dispatcher: Dispatcher) -> None:
        received = dispatcher.dispatch(rows, idx)
        dispatcher.combine(received.rows_QH, received)

    figures: dict[str, float] = {}
    for _ in range(job["rounds"]):
        for name, work, num_exchanges in (
            ("fabric_us", lambda: layer(one_sided), 2),
            ("gloo_us", lambda: collectives.exchange_rows(rows, share, share), 1),
            ("fabric_layer_us", lambda: layer(one_sided), 1),
            ("gloo_layer_us", lambda: layer(portable), 1),
        ):
            work()
            started = time.perf_counter()
            for _ in range(job["repeats"]):
                work()
            took_us = (time.perf_counter() - started) / job["repeats"] / num_exchanges * 1e6
            figures[name] = min(took_us, figures.get(name, took_us))
    say(figures)


class BenchInbox:
    """All requests wait from the start; counts what is still open."""

    def __init__(self, num_requests: int, num_tokens: int, first: int) -> None:
        prompts = [[1] + [6 + (7 * (first + i) + 13 * j) % 3000 for j in range(19)] for i in range(num_requests)]
        greedy = Sampling(temperature=0)
        self._waiting = [
            encode(Request(id=str(i), prompt_tokens=prompt, max_tokens=num_tokens, sampling=greedy))
            for i, prompt in enumerate(prompts)
        ]
        self.num_open = num_requests

    def receive(self) -> tuple[bytes, bytes] | None:
        return (b"bench", self._waiting.pop()) if self._waiting else None

    def wait(self, timeout_ms: float, doorbells: list[int]) -> bool:
        return bool(self._waiting)

    def send(self, client: bytes, payload: bytes) -> None:
        self.num_open -= sum(update.terminal is not None for update in decode_outputs(payload).updates)


def measure_engine(job: dict[str, Any], plan: Plan) -> None:
    """A line of {requests, tokens} after the other; the seconds until all ranks are done with it."""
    rank, world_size = job["rank"], plan.fleet.topology.world_size
    dispatcher = fabric(rank, plan) if world_size > 1 else LocalDispatcher(plan.num_experts)
    context = RankContext(rank=rank, world_size=world_size, tray=0, num_trays=1, local_rank=rank, device="cpu",
                          bind_host="127.0.0.1")  # fmt: skip
    engine = build_engine(plan.fleet, context, dispatcher=dispatcher, progress=lambda stage, done: None)
    say("ready")
    while job := hear():
        say(run_once(engine, job))


def run_once(engine: Engine, job: dict[str, int]) -> float:
    """Seconds of one run to the agreed stop."""
    engine._is_stopping = False  # it is used again, which a fleet's never is
    inbox = BenchInbox(job["requests"], job["tokens"], first=100 * engine.rank)
    started = time.perf_counter()
    engine.run(inbox, lambda: not inbox.num_open)
    return time.perf_counter() - started


def main() -> None:
    """The first line says what is measured."""
    torch.set_num_threads(1)
    job = hear()
    plan = resolve(compose_fleet([*job["overrides"], f"model.path={Path(job['path'])}"]))
    {"exchange": measure_exchange, "engine": measure_engine}[job["kind"]](job, plan)


if __name__ == "__main__":
    main()
