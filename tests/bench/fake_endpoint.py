"""An OpenAI endpoint of known timing that fails on demand: a real server on loopback, without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

TTFT_S, ITL_S = 0.05, 0.02
MODEL = "fake"


@dataclass(frozen=True)
class Act:
    """How one request is answered.

    Args:
        fault: "" for none, else what goes wrong; see `_stream`.
        after: tokens that come before the fault.
        wait_s: before anything else.
    """

    fault: str = ""
    after: int = 2
    wait_s: float = 0.0
    cached: int = 0
    status: int = 200


@dataclass
class FakeEndpoint:
    """Takes completions and chats, one word a token; keeps the bodies.

    Args:
        acts: how the request of this number (from 0, in order of arrival) is answered; the others are answered well.
        refuses: fields that it answers with 400.
        has_counts: whether it honours continuous_usage_stats.
        has_usage: whether its streams end with usage.
        metrics: what /metrics says after so many requests; None: there is no such path.
    """

    acts: Callable[[int], Act] = lambda number: Act()
    refuses: tuple[str, ...] = ()
    has_counts: bool = False
    has_usage: bool = True
    card: dict[str, Any] = field(default_factory=lambda: {"id": MODEL, "owned_by": "somebody"})
    metrics: Callable[[int], str] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    url: str = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeEndpoint]:
        """On a free port; `url` ends in /v1."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._answer),
                web.post("/v1/chat/completions", self._answer),
            ]
        )
        async with TestServer(app, handler_cancellation=True) as server:
            self.url = f"http://127.0.0.1:{server.port}/v1"
            yield self

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "ranks": [{"rank": 0}, {"rank": 1}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics(len(self.bodies)))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        arrived_s = asyncio.get_running_loop().time()
        body = await request.json()
        asked = {*body, *body.get("stream_options", {})}
        if refused := next((name for name in self.refuses if name in asked), None):
            return web.json_response({"error": {"message": f"{refused}: is not supported"}}, status=400)
        act = self.acts(len(self.bodies))
        self.bodies.append(body)
        self.sessions.append(request.headers.get("X-Session-Id", ""))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(act.wait_s)
            if act.status != 200:
                return web.json_response({"error": {"message": "no"}}, status=act.status)
            return await self._stream(request, body, act, arrived_s)
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], act: Act, began_s: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat, total = "messages" in body, body["max_tokens"]
        has_counts = self.has_counts and body["stream_options"].get("continuous_usage_stats")
        if act.fault == "short":
            total = max(total - 1, 1)
        if is_chat:
            await _say(response, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number in range(total):
            if act.fault and number == act.after and (await self._break(request, response, act.fault)):
                return response
            await _sleep_until(began_s + act.wait_s + TTFT_S + number * ITL_S)
            text = "" if act.fault == "textless" and number == act.after else f"w{number} "
            if text or has_counts:
                chunk = {"choices": [_piece(text, is_chat=is_chat)]}
                await _say(response, chunk | ({"usage": self._usage(body, number + 1, act)} if has_counts else {}))
        if act.fault != "no_finish":
            reason = "abort" if act.fault == "odd_finish" else "length"
            empty: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            end: dict[str, Any] = {"choices": [empty | {"finish_reason": reason}]}
            await _say(response, end | ({"usage": self._usage(body, total, act)} if has_counts else {}))
        if self.has_usage and act.fault != "no_usage":
            await _say(response, {"choices": [], "usage": self._usage(body, total, act)})
        if act.fault != "no_done":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, fault: str) -> bool:
        """Faults in the middle of a stream; True: it is over."""
        if fault == "truncated":
            return True
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return True
        if fault == "error_event":
            await _say(response, {"error": {"message": "the engine failed"}})
            return True
        if fault == "garbage":
            await response.write(b"data: {not json\n\n")
            return True
        if fault == "stall":
            await asyncio.sleep(30)
        return False

    def _usage(self, body: dict[str, Any], num_output: int, act: Act) -> dict[str, Any]:
        prompt = body.get("prompt") or [word for message in body["messages"] for word in message["content"].split()]
        num_prompt = len(prompt.split() if isinstance(prompt, str) else prompt)
        num_prompt += act.fault == "prompt_miscounted"
        num_output += {"output_overcounted": 5, "output_undercounted": -2}.get(act.fault, 0)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": act.cached},
        }


def _piece(text: str, *, is_chat: bool) -> dict[str, Any]:
    """Of a chat, the first two tokens are thoughts, under both of their names."""
    said = {"w0 ": "reasoning_content", "w1 ": "reasoning"}.get(text, "content")
    return {"delta": {said: text}, "finish_reason": None} if is_chat else {"text": text, "finish_reason": None}


async def _say(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(at_s - asyncio.get_running_loop().time(), 0))
