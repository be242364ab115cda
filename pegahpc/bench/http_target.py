"""Any OpenAI endpoint as a target: streamed completions or chats, each event timed when its bytes arrive."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from pegahpc.bench.answers import Answer, Ask, Usage
from pegahpc.bench.experts import SETTLE_S, Counts, read_counts
from pegahpc.bench.prompts import Form
from pegahpc.bench.records import STALLED, TRUNCATED
from pegahpc.bench.sse import EventStream

PATHS: dict[Form, str] = {"tokens": "/completions", "text": "/completions", "chat": "/chat/completions"}
METRICS_TIMEOUT_S = 10.0
DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """How an endpoint is asked.

    Args:
        url: ends in /v1, or wherever the API begins.
        stall_s: bound between two pieces of a stream.
        extras: fields beyond OpenAI's that the endpoint was found to honour (`ignore_eos`, ...).
    """

    url: str
    api_key: str | None
    model: str
    form: Form
    temperature: float = 0.0
    stall_s: float = 60.0
    extras: dict[str, Any] = field(default_factory=dict)
    stream_extras: dict[str, Any] = field(default_factory=dict)
    has_exact_length: bool = True  # min_tokens is sent where it is honoured, with the length of each answer
    sends_min_tokens: bool = False


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None  # DeepSeek's name of what a model thinks, and
    reasoning: str | None = None  # vLLM's


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """One chunk of a stream, of either endpoint; what is not measured is left out."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_read_event = msgspec.json.Decoder(Event).decode


class HttpTarget:
    """One endpoint. Use as an async context; proxy variables are ignored, connections are not limited."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.form: Form = settings.form

    async def __aenter__(self) -> HttpTarget:
        headers = {"Authorization": f"Bearer {self.settings.api_key}"} if self.settings.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # the driver bounds each request, `stall_s` each gap
            raise_for_status=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """One streamed request, read to its very end."""
        settings = self.settings
        headers = {"X-Session-Id": ask.session} if ask.session else {}
        url = settings.url + PATHS[settings.form]
        try:
            body = body_of(settings, ask)
            async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    answer.fail(f"http_{response.status}", (await response.content.read(2000)).decode(errors="replace"))
                    return
                await self._read(response, answer)
        except aiohttp.ClientConnectorError as error:
            answer.fail("not_connected", str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.fail("connection_lost", str(error) or type(error).__name__)

    async def get(self, url: str) -> tuple[int, bytes]:
        """Status and body of a GET; 0 where nobody answers."""
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=METRICS_TIMEOUT_S)) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, b""

    async def expert_counts(self) -> Counts | None:
        """From /metrics beside /v1, when the gateway has heard all of it."""
        if read_counts(await self._metrics()) is None:
            return None
        await asyncio.sleep(SETTLE_S)
        return read_counts(await self._metrics())

    async def _metrics(self) -> str | None:
        status, body = await self.get(self.settings.url.removesuffix("/v1") + "/metrics")
        return body.decode(errors="replace") if status == 200 else None

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        events = EventStream()
        pieces = response.content.iter_any()
        while True:
            try:
                async with asyncio.timeout(self.settings.stall_s if answer.event_s else None):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                break
            except TimeoutError:
                return answer.fail(STALLED, f"no byte for {self.settings.stall_s:g} s")
            try:
                for data in events.feed(piece):
                    self._take(data, answer)
            except (msgspec.MsgspecError, ValueError) as error:
                return answer.fail("malformed", str(error))
        if answer.ended_s is None:
            answer.fail(TRUNCATED, "the stream ended without [DONE]")

    def _take(self, data: bytes, answer: Answer) -> None:
        if data == DONE:
            answer.ended_s = time.monotonic()
        elif answer.ended_s is None:
            take_event(_read_event(data), answer, has_counts=bool(self.settings.stream_extras))


def body_of(settings: HttpSettings, ask: Ask) -> dict[str, Any]:
    """The JSON document of a request."""
    body: dict[str, Any] = {
        "model": settings.model,
        "messages" if settings.form == "chat" else "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True, **settings.stream_extras},
        **settings.extras,
    }
    if settings.sends_min_tokens:
        body["min_tokens"] = ask.output_tokens
    if settings.temperature > 0:
        body["seed"] = ask.seed
    return body


def take_event(event: Event, answer: Answer, *, has_counts: bool) -> None:
    """One event: an error, tokens, text, the finish, the usage.

    Args:
        has_counts: each event's usage says how many tokens there are so far; else an event is a token (`_is_token`).
    """
    if event.error is not None:
        said = event.error.get("message", "") if isinstance(event.error, dict) else str(event.error)
        answer.fail("server_error", said)
    if event.usage is not None:
        answer.usage = _counted(event.usage)
    for choice in event.choices[:1]:
        if has_counts and answer.usage is not None:
            if (new_tokens := answer.usage.completion_tokens - sum(answer.event_tokens)) > 0:
                answer.on_tokens(new_tokens)
        elif _is_token(choice, answer):
            answer.on_tokens(None)
        if text := _text_of(choice):
            answer.texts.append(text)
        answer.finish_reason = choice.finish_reason or answer.finish_reason


def _counted(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=details.cached_tokens if details else None,
    )


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    return choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)) or ""


def _is_token(choice: _Choice, answer: Answer) -> bool:
    """Whether an event stands for a token.

    Text does. The finish without text does when it is a stop token's, which is counted and not shown, or when nothing
    was shown at all. Before that, an event without text is a token that completes no character; a chat's opening,
    which only names the role, is not.
    """
    if _text_of(choice):
        return True
    if choice.finish_reason is not None:
        return choice.finish_reason == "stop" or not answer.event_s
    delta = choice.delta
    return delta.role is None and delta.content is not None if delta else choice.text is not None
