"""One rank of a fleet without trays: a real engine over gloo, its requests from stdin, what it did on stdout (JSON)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engines import CLIENT, context, record_logits, resolved
from torch._C._distributed_c10d import TCPStore

from pegahpc.engine.build import build_engine
from pegahpc.moe.collectives_torch import TorchCollectives
from pegahpc.moe.dispatch_collective import CollectiveDispatcher
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.moe.fabric import FabricPort, SlabShape
from pegahpc.wire.messages import Request, Sampling, StepOutputs, decode_outputs, encode


class ListInbox:
    """An inbox that holds all requests from the start and keeps what is sent."""

    def __init__(self, requests: list[Request]) -> None:
        self.waiting = [encode(request) for request in requests]
        self.sent: list[StepOutputs] = []
        self.num_open = len(requests)

    def receive(self) -> tuple[bytes, bytes] | None:
        return (CLIENT, self.waiting.pop(0)) if self.waiting else None

    def wait(self, timeout_ms: float, doorbells: list[int]) -> bool:
        return bool(self.waiting)

    def send(self, client: bytes, payload: bytes) -> None:
        outputs = decode_outputs(payload)
        self.sent.append(outputs)
        self.num_open -= sum(update.terminal is not None for update in outputs.updates)


def connect(job: dict[str, Any], kind: str) -> CollectiveDispatcher | FabricDispatcher:
    """Say one line for the others (a port or an address), hear what all said, and join."""
    rank, world_size, num_experts = job["rank"], job["world_size"], job["num_experts"]
    if kind == "mpi":
        from pegahpc.moe.collectives_mpi import MpiCollectives  # importing mpi4py.MPI starts MPI

        return CollectiveDispatcher(MpiCollectives(), num_experts=num_experts)
    if kind == "torch":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        print(json.dumps(store.port if store else 0), flush=True)
        port = json.loads(sys.stdin.readline())[0]
        store = store or TCPStore("127.0.0.1", port)
        collectives = TorchCollectives(store, rank=rank, world_size=world_size, timeout_s=60)
        return CollectiveDispatcher(collectives, num_experts=num_experts)
    shape = SlabShape(world_size=world_size, num_local_experts=num_experts // world_size, max_pairs=128 * 4,
                      hidden=job["hidden"], dtype=torch.float32)  # fmt: skip
    port = FabricPort(rank, shape)
    print(json.dumps(port.address), flush=True)
    return FabricDispatcher.connect(port, json.loads(sys.stdin.readline()), timeout_s=60)


def read_job() -> dict[str, Any]:
    """This rank's job: a line of its own, or (under mpirun) its share of a file that all ranks read."""
    if len(sys.argv) == 1:
        job: dict[str, Any] = json.loads(sys.stdin.readline())
        return job
    from mpi4py import MPI

    job = json.loads(Path(sys.argv[1]).read_text())
    return job | {"rank": MPI.COMM_WORLD.rank, "requests": job["requests_by_rank"][MPI.COMM_WORLD.rank]}


def main() -> None:
    job = read_job()
    rank, world_size = job["rank"], job["world_size"]
    dispatcher = connect(job, job["dispatcher"])
    fleet = resolved(Path(job["folder"]), *job["overrides"], ep_size=world_size)
    engine = build_engine(fleet, context(rank, world_size), dispatcher=dispatcher, progress=lambda stage, done: None)
    before, digests = dispatcher.num_exchanges, record_logits(engine)
    requests = [
        Request(id=name, prompt_tokens=prompt, max_tokens=num, sampling=Sampling(**sampling))
        for name, prompt, num, sampling in job["requests"]
    ]
    inbox = ListInbox(requests)
    first_step = engine.status.step
    started = time.perf_counter()
    engine.run(inbox, lambda: not inbox.num_open)
    seconds = time.perf_counter() - started
    steps = engine.status.step - first_step
    tokens: dict[str, list[int]] = {}
    for outputs in inbox.sent:
        for update in outputs.updates:
            tokens.setdefault(update.id, []).extend(update.tokens)
    answer = {"tokens": tokens, "steps": steps, "exchanges": dispatcher.num_exchanges - before,
              "seconds": seconds, "logits": digests}  # fmt: skip
    print(json.dumps(answer), flush=True)
    dispatcher.close()


if __name__ == "__main__":
    main()
