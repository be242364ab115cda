"""One generation, from its body to its last byte: parse, tokenize, send to ranks, answer as JSON or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import Callable

from aiohttp import web

from pegahpc.gateway.appkeys import ENGINES, FAILURES, GATE, MODEL, TOKENIZER_POOL
from pegahpc.gateway.choices import Choices
from pegahpc.gateway.errors import ApiError
from pegahpc.gateway.events import Events, closing
from pegahpc.gateway.request_ids import ANSWER, log_failure
from pegahpc.gateway.shapes import CHAT, COMPLETION, Answer, Shape
from pegahpc.gateway.uploads import read_body
from pegahpc.gateway.whole import usage_of, whole

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
    """A client that leaves cancels this task; leaving the `Choices` block then aborts all that is not done."""
    app, arrived_s = request.app, time.monotonic()
    body = await read_body(request)  # before the gate: a slow upload must not hold a place
    model = app[MODEL]
    generation = shape.parse(body, model.name)
    with app[GATE].enter(generation.num_sequences):
        request_id = request[ANSWER] = f"{shape.id_prefix}{random.getrandbits(96):024x}"  # unique, not secret
        loop = asyncio.get_running_loop()
        planned = await loop.run_in_executor(app[TOKENIZER_POOL], model.plan, generation, request_id)
        session = request.headers.get("X-Session-Id", "")
        with Choices(app[ENGINES], generation, planned, model, session=session, arrived_s=arrived_s) as choices:
            answer = Answer(shape, generation, request_id=request_id, model=model)
            if generation.is_streamed:
                return await _answer_in_events(request, answer, choices)
            return await _answer_whole(request, answer, choices)


async def _answer_whole(request: web.Request, answer: Answer, choices: Choices) -> web.Response:
    pieces: list[list[str]] = [[] for _ in choices.outputs]
    while not choices.are_over:
        for idx, text in await choices.take():
            pieces[idx].append(text)
    write = functools.partial(whole, answer, choices.outputs, ["".join(texts) for texts in pieces])
    body = await _in_thread(request, write) if answer.generation.tells_prompts else write()
    return web.Response(body=body, content_type="application/json")


async def _answer_in_events(request: web.Request, answer: Answer, choices: Choices) -> web.StreamResponse:
    """Headers go out with the first update, so that a refusal is still a status of its own."""
    news, is_long = await choices.take(), answer.generation.tells_prompts
    events = [Events(answer, index) for index in range(len(choices.outputs))]
    say = functools.partial(_said, events, choices, counts=answer.generation.counts_in_events)
    response = web.StreamResponse(headers=STREAM_HEADERS)
    with contextlib.suppress(ConnectionResetError):  # the client left between two writes
        await response.prepare(request)
        data = b"".join([each.opening() for each in events])
        data += await _in_thread(request, functools.partial(say, news)) if is_long else say(news)
        try:
            while not choices.are_over:
                if data:
                    await response.write(data)
                news = await choices.take()
                data = await _in_thread(request, functools.partial(say, news)) if is_long else say(news)
            data += closing(answer, usage_of(choices.outputs, num_candidates=answer.generation.num_candidates))
        except ApiError as error:
            log_failure(request.app[FAILURES], request, error)
            data = b"data: " + error.encode() + b"\n\n"
        await response.write(data)
        await response.write_eof()
    return response


async def _in_thread(request: web.Request, write: Callable[[], bytes]) -> bytes:
    """Write beside the event loop: a prompt of 100,000 tokens with 20 alternatives each takes seconds."""
    return await asyncio.get_running_loop().run_in_executor(request.app[TOKENIZER_POOL], write)


def _said(events: list[Events], choices: Choices, news: list[tuple[int, str]], *, counts: bool) -> bytes:
    """What has come of each choice, and its end; with its usage so far if that `counts` in each event."""
    data = b""
    for idx, text in news:
        output = choices.outputs[idx]
        usage = usage_of([output], num_candidates=1) if counts else None
        data += events[idx].text(text, output.take_shown(), usage)
        if output.finish_reason is not None:
            data += events[idx].finish(output.finish_reason, usage)
    return data
