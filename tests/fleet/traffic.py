"""Mixed traffic for one fleet: whole and streamed, finished, left early, and impossible; what came of each request."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

MAX_MODEL_LEN = 512
IMPOSSIBLE: list[dict[str, Any]] = [
    {"prompt": [7] * (MAX_MODEL_LEN + 1)},
    {"prompt": [7] * 20, "max_tokens": MAX_MODEL_LEN},
    {"prompt": [7], "temperature": 9},
    {"prompt": [7], "max_tokens": -1},
    {"prompt": []},
    {"prompt": [7], "no_such_field": 1},
    {"prompt": [10**9]},
    {"model": "another", "prompt": [7]},
]


@dataclass(frozen=True)
class Ask:
    """One request. `subject` numbers its (prompt, seed, length): answers to one subject are alike."""

    body: dict[str, Any]
    subject: int = -1  # -1: impossible
    leaves_after: float | None = None  # seconds, or events of a stream; None: stays until the end


@dataclass(frozen=True)
class Answer:
    """What a client that stayed was told; `num_ends` counts finish reasons and errors."""

    status: int
    text: str
    num_ends: int
    usage: dict[str, Any]


def asks(count: int, seed: int, *, left_share: float, impossible_share: float) -> list[Ask]:
    """Mixed requests: few beginnings, four times as many requests as subjects."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, 3000) for _ in range(draw.randrange(0, 260))] for _ in range(8)]
    subjects = [_subject(draw, beginnings) for _ in range(max(count // 4, 1))]
    made: list[Ask] = []
    for _ in range(count):
        is_streamed = draw.random() < 0.5
        if draw.random() < impossible_share:
            made.append(Ask({"max_tokens": 5, "stream": is_streamed} | draw.choice(IMPOSSIBLE)))
            continue
        subject = draw.randrange(len(subjects))
        stream = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        leaves = draw.random() < left_share
        after = (draw.randrange(0, 6) if is_streamed else draw.uniform(0.0, 0.4)) if leaves else None
        made.append(Ask(subjects[subject] | stream, subject, after))
    return made


def _subject(draw: random.Random, beginnings: list[list[int]]) -> dict[str, Any]:
    rest = [draw.randrange(3, 3000) for _ in range(draw.randrange(1, 90))]
    sampling = {"temperature": 0} if draw.random() < 0.3 else {"temperature": 1.0, "seed": draw.randrange(1 << 40)}
    length = {"max_tokens": draw.randrange(1, 60), "ignore_eos": draw.random() < 0.5}
    return {"prompt": draw.choice(beginnings) + rest, **sampling, **length}


async def send(url: str, key: str, made: list[Ask], *, num_at_once: int) -> list[Answer | None]:
    """Send all of them, so many at a time; None for those whose client left."""
    headers = {"Authorization": f"Bearer {key}"}
    places = asyncio.Semaphore(num_at_once)
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def one(ask: Ask) -> Answer | None:
            async with places:
                work = _stream if ask.body.get("stream") else _whole
                return await work(session, f"{url}/completions", ask)

        return await asyncio.gather(*(one(ask) for ask in made))


async def _whole(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answer | None:
    try:
        async with asyncio.timeout(ask.leaves_after), session.post(url, json={"model": "tiny-moe"} | ask.body) as said:
            document = await said.json()
    except TimeoutError:
        assert ask.leaves_after is not None
        return None
    if said.status != 200:
        return Answer(said.status, document["error"]["message"], 1, {})
    (choice,) = document["choices"]
    return Answer(200, choice["text"], int(choice["finish_reason"] in ("stop", "length")), document["usage"])


async def _stream(session: aiohttp.ClientSession, url: str, ask: Ask) -> Answer | None:
    text, num_ends, num_marks, num_events = "", 0, 0, 0
    usage: dict[str, Any] = {}
    async with session.post(url, json={"model": "tiny-moe"} | ask.body) as said:
        if said.status != 200:
            return Answer(said.status, (await said.json())["error"]["message"], 1, {})
        async for line in said.content:
            if ask.leaves_after is not None and num_events >= ask.leaves_after:
                said.close()
                return None
            if line == b"data: [DONE]\n":
                num_marks += 1
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                num_events += 1
                num_ends += "error" in event
                for choice in event.get("choices", []):
                    text += choice["text"]
                    num_ends += choice["finish_reason"] is not None
                usage = event.get("usage") or usage
    assert num_marks == 1
    return Answer(200, text, num_ends, usage)
