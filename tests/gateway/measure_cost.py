"""Measure the gateway's own CPU time a request, with a rank that costs nothing: `python -m tests.gateway.measure_cost`.

Prints milliseconds of the gateway, and of its templates' processes, a plain request and a stream of 64 tokens; asserts
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import msgspec
import psutil

from pegahpc.config import compose_fleet
from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.messages import (
    Finished,
    Load,
    Request,
    RequestUpdate,
    Scheduled,
    StepOutputs,
    decode_to_rank,
    encode,
)
from pegahpc.wire.sockets import RankSocket

NUM_TOKENS = 64
LOAD = Load(num_running=0, num_waiting=0, used_pages=0, total_pages=100)


def run_rank(secret: FleetSecret, pipe: Connection, step_s: float) -> None:
    """A rank whose every step gives each open request its next token; `step_s` 0 gives all tokens at once."""
    with RankSocket("127.0.0.1", secret) as rank:
        pipe.send(rank.endpoint)
        client, step, left, fresh = b"", 0, dict[str, int](), dict[str, Request]()
        while not pipe.poll():
            rank.wait(0 if left else 50)
            while (received := rank.receive()) is not None:
                client, message = received[0], decode_to_rank(received[1])
                if isinstance(message, Request):
                    fresh[message.id], left[message.id] = message, NUM_TOKENS
            step += 1
            updates = []
            for name in list(left):
                num_tokens = 1 if step_s else NUM_TOKENS
                update = RequestUpdate(id=name, tokens=[70 + step % 26] * num_tokens)
                if left[name] == NUM_TOKENS:
                    update.scheduled = Scheduled(queued_at_s=0.0, scheduled_at_s=0.0)
                left[name] -= num_tokens
                if not left[name]:
                    num_prompt_tokens = len(fresh.pop(name).prompt_tokens)
                    update.terminal = Finished(
                        reason="length", prompt_tokens=num_prompt_tokens, completion_tokens=NUM_TOKENS
                    )
                    del left[name]
                updates.append(update)
            if client:
                with contextlib.suppress(ConnectionError):  # the gateway has left
                    rank.send(client, encode(StepOutputs(rank=0, step=step, load=LOAD, updates=updates)))
            if left:
                time.sleep(step_s)


async def load(url: str, key: str, *, num_connections: int, seconds: float, is_streamed: bool) -> tuple[int, int]:
    """(requests, chunks) that were answered."""
    body = {
        "model": "tiny-moe",
        "messages": [{"role": "user", "content": "Tell me a story about a fox and a crow. " * 4}],
        "stream": is_streamed,
        "max_tokens": NUM_TOKENS,
    }
    end_s = time.monotonic() + seconds
    counts = [0, 0]

    async def one(http: aiohttp.ClientSession) -> None:
        while time.monotonic() < end_s:
            async with http.post(url + "/v1/chat/completions", json=body) as response:
                data = await response.read()
            assert response.status == 200 and (not is_streamed or data.endswith(b"data: [DONE]\n\n"))
            counts[0] += 1
            counts[1] += data.count(b'"content"')

    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*[one(http) for _ in range(num_connections)])
    return counts[0], counts[1]


def measure(*, is_streamed: bool, num_connections: int, seconds: float, step_s: float) -> dict[str, object]:
    """One run with a gateway and a rank of its own."""
    secret = FleetSecret.create()
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.Process(target=run_rank, args=(secret, theirs, step_s))
    rank.start()
    with tempfile.TemporaryDirectory() as folder:
        secret.save(Path(folder) / "secret")
        document = {
            "fleet": compose_fleet([]), "endpoints": [ours.recv()], "secret_path": str(Path(folder) / "secret"),
            "host": "127.0.0.1", "port": 0,
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "pegahpc.gateway.main"]
        gateway = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert gateway.stdin is not None and gateway.stdout is not None
        gateway.stdin.write(msgspec.msgpack.encode(document))
        gateway.stdin.close()
        while (where := json.loads(gateway.stdout.readline()))["event"] == "beat":
            continue
        url = f"http://{where['host']}:{where['port']}"
        asyncio.run(load(url, secret.api_key, num_connections=4, seconds=1.0, is_streamed=is_streamed))
        before, templates_before = cpu_times(gateway.pid)
        num_requests, num_chunks = asyncio.run(
            load(url, secret.api_key, num_connections=num_connections, seconds=seconds, is_streamed=is_streamed)
        )
        after, templates_after = cpu_times(gateway.pid)
        gateway.terminate()
        gateway.wait()
    ours.send("end")
    rank.join()
    user_ms, system_ms = ((after[idx] - before[idx]) * 1000 / num_requests for idx in (0, 1))
    return {
        "streamed": is_streamed,
        "connections": num_connections,
        "requests": num_requests,
        "chunks_a_request": round(num_chunks / num_requests, 1),
        "requests_per_s": round(num_requests / seconds),
        "gateway_cpu_ms_a_request": round(user_ms + system_ms, 3),
        "of_which_system_ms": round(system_ms, 3),
        "templates_cpu_ms_a_request": round((templates_after - templates_before) * 1000 / num_requests, 3),
    }


def cpu_times(pid: int) -> tuple[tuple[float, float], float]:
    """Seconds: user and system of the gateway, and the sum of both of the processes that render its chats."""
    process = psutil.Process(pid)
    own = process.cpu_times()
    children = [child.cpu_times() for child in process.children()]
    return (own.user, own.system), sum(times.user + times.system for times in children)


def main() -> None:
    """Both kinds of request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=64)
    given = parser.parse_args()
    for is_streamed, step_s in ((False, 0.0), (True, 0.005)):
        result = measure(
            is_streamed=is_streamed, num_connections=given.connections, seconds=given.seconds, step_s=step_s
        )
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
