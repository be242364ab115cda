"""One generation, from its body to its last byte: parse, tokenize, send to a rank, answer as JSON or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from aiohttp import web

from pegahpc.gateway.appkeys import ENGINES, GATE, MODEL, TOKENIZER_POOL
from pegahpc.gateway.model import ServedModel
from pegahpc.gateway.openai import Generation
from pegahpc.gateway.output import Output
from pegahpc.gateway.router import RouteHint
from pegahpc.gateway.shapes import CHAT, COMPLETION, Events, Shape, whole
from pegahpc.gateway.streams import Stream
from pegahpc.wire.messages import Request

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _generate(request, CHAT)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _generate(request, COMPLETION)


async def _generate(request: web.Request, shape: Shape) -> web.StreamResponse:
    """A client that leaves cancels this task; leaving the `open` block then aborts the request on its rank."""
    app, arrived_s = request.app, time.monotonic()
    body = await request.read()  # before the gate: a slow upload must not hold a place
    with app[GATE].enter():
        model = app[MODEL]
        generation = shape.parse(body, model.name)
        request_id = f"{shape.id_prefix}{random.getrandbits(96):024x}"  # unique, not secret: no system call
        loop = asyncio.get_running_loop()
        sent, names = await loop.run_in_executor(app[TOKENIZER_POOL], _prepare, model, generation, request_id)
        hint = RouteHint(names, request.headers.get("X-Session-Id", ""))
        wakes_each_step = generation.is_streamed or bool(generation.stop)
        with app[ENGINES].open(sent, hint=hint, arrived_s=arrived_s, wakes_each_step=wakes_each_step) as stream:
            output = Output(model.codec.detokenizer(), generation.stop, num_prompt_tokens=len(sent.prompt_tokens))
            try:
                if generation.is_streamed:
                    return await _answer_in_events(request, shape, generation, stream, output)
                return await _answer_whole(model.name, shape, stream, output)
            finally:
                stream.times.on_end(output.outcome, time.monotonic())


def _prepare(model: ServedModel, generation: Generation, request_id: str) -> tuple[Request, list[bytes]]:
    """What goes over the wire, and the names that route it. Off the event loop: both take as long as the prompt is."""
    sent = model.to_request(generation, request_id)
    return sent, model.prefix_names(sent.prompt_tokens)


async def _answer_whole(model_name: str, shape: Shape, stream: Stream, output: Output) -> web.Response:
    pieces = []
    while not output.is_over:
        pieces.append(output.feed(await stream.take()))
    if output.finish_reason is None:
        assert output.failure is not None
        raise output.failure
    body = whole(
        shape,
        request_id=stream.request_id,
        model=model_name,
        created=int(time.time()),
        text="".join(pieces),
        finish_reason=output.finish_reason,
        usage=output.usage,
    )
    return web.Response(body=body, content_type="application/json")


async def _answer_in_events(
    request: web.Request, shape: Shape, generation: Generation, stream: Stream, output: Output
) -> web.StreamResponse:
    """Headers go out with the first update, so that a refusal is still a status of its own."""
    text = output.feed(await stream.take())
    if output.failure is not None:
        raise output.failure
    events = Events(
        shape,
        request_id=stream.request_id,
        model=request.app[MODEL].name,
        created=int(time.time()),
        include_usage=generation.include_usage,
    )
    response = web.StreamResponse(headers=STREAM_HEADERS)
    with contextlib.suppress(ConnectionResetError):  # the client left between two writes
        await response.prepare(request)
        data = events.opening() + events.text(text)
        while not output.is_over:
            if data:
                await response.write(data)
            data = events.text(output.feed(await stream.take()))
        await response.write(data + _last_events(events, output))
        await response.write_eof()
    return response


def _last_events(events: Events, output: Output) -> bytes:
    if output.finish_reason is not None:
        return events.closing(output.finish_reason, output.usage)
    assert output.failure is not None
    return b"data: " + output.failure.encode() + b"\n\n"
