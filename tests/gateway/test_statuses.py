"""docs/api.md's table of errors holds: each status and code can be provoked, with its headers; there are no others."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegahpc.gateway import template_pool, uploads
from pegahpc.gateway.appkeys import GATE, MODEL
from pegahpc.wire.messages import CacheBudget, Failed, Rejected, RequestUpdate, Terminal
from tests.gateway.conftest import TINY, Serve, Served

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| (\d{3}) \| `(\w+)` \| .+? \|(?: `([\w-]+)(?:: (.+))?`)? \|")
BODY = b'{"model": "tiny-moe", "prompt": "hi"}'
CHAT = b'{"model": "tiny-moe", "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "x"}]}'


@dataclass
class Got:
    """One answer, read from the socket."""

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class House:
    """What a provocation may use to set up its gateway."""

    serve: Serve
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def model(self, template: str | None) -> str:
        for name in ("config.json", "tokenizer.json"):
            (self.folder / name).write_bytes((TINY / name).read_bytes())
        if template is not None:
            (self.folder / "chat_template.jinja").write_text(template)
        return f"model.path={self.folder}"


async def answer(served: Served, data: bytes) -> Got:
    reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
    with closing(writer):
        writer.write(data)
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.title(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers["Content-Length"]))
    return Got(int(first.split()[1]), headers, msgspec.json.decode(body) if body else {})


async def post(
    served: Served,
    path: str = "/v1/completions",
    body: bytes = BODY,
    *,
    method: str = "POST",
    headers: Mapping[str, str] = {},
) -> Got:
    all_headers = {"Host": "x", "Authorization": f"Bearer {served.key}", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return await answer(served, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def with_request(*overrides: str, **request: Any) -> Callable[[House], Awaitable[Got]]:
    async def provoke(house: House) -> Got:
        async with house.serve(*overrides) as served:
            return await post(served, **request)

    return provoke


def with_bytes(data: bytes) -> Callable[[House], Awaitable[Got]]:
    async def provoke(house: House) -> Got:
        async with house.serve() as served:
            return await answer(served, data)

    return provoke


def with_template(template: str | None) -> Callable[[House], Awaitable[Got]]:
    async def provoke(house: House) -> Got:
        house.monkeypatch.setattr(template_pool, "CPU_S", 0.3)
        async with house.serve(house.model(template)) as served:
            return await post(served, "/v1/chat/completions", CHAT)

    return provoke


def with_terminal(terminal: Terminal) -> Callable[[House], Awaitable[Got]]:
    async def provoke(house: House) -> Got:
        async with house.serve() as served:
            served.engine.script = lambda request: [RequestUpdate(id=request.id, terminal=terminal)]
            return await post(served)

    return provoke


def with_gate(**flags: bool) -> Callable[[House], Awaitable[Got]]:
    async def provoke(house: House) -> Got:
        async with house.serve() as served:
            for name, value in flags.items():
                setattr(served.app[GATE], name, value)
            return await post(served)

    return provoke


async def held(served: Served) -> "asyncio.Task[Got]":
    """A request in work."""
    served.engine.is_holding = True
    task = asyncio.create_task(post(served))
    await asyncio.to_thread(served.engine.wait_for_request)
    return task


async def full(house: House) -> Got:
    async with house.serve("gateway.max_concurrent_requests=1") as served:
        task = await held(served)
        got = await post(served)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return got


async def no_place(house: House) -> Got:
    async with house.serve(max_connections=1) as served:
        task = await held(served)
        got = await answer(served, b"")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return got


async def slow(house: House) -> Got:
    house.monkeypatch.setattr(uploads, "BODY_S", 0.2)
    async with house.serve() as served:
        return await post(served, body=BODY[:-1], headers={"Content-Length": str(len(BODY))})


async def stalled(house: House) -> Got:
    async with house.serve("gateway.stall_s=1.0") as served:
        served.engine.is_frozen = True
        await asyncio.sleep(1.3)
        return await post(served)


async def broken(house: House) -> Got:
    async with house.serve() as served:
        house.monkeypatch.setattr(served.app[MODEL], "plan", None)
        return await post(served)


async def killed(house: House) -> Got:
    house.monkeypatch.setattr(template_pool, "COMMAND", [sys.executable, "-c", "raise SystemExit(1)"])
    async with house.serve() as served:
        return await post(served, "/v1/chat/completions", CHAT)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PROVOKE: dict[str, Callable[[House], Awaitable[Got]]] = {
    "invalid_value": with_request(body=b'{"model": "tiny-moe", "prompt": "x", "suffix": "y"}'),
    "invalid_json": with_request(body=b"[]"),
    "invalid_body": with_request(headers={"Content-Encoding": "gzip"}),
    "invalid_http": with_bytes(b"\x16\x03\x01\r\n\r\n"),
    "context_length_exceeded": with_request(body=b'{"model": "tiny-moe", "prompt": "x", "max_tokens": 999}'),
    "cache_budget_exceeded": with_terminal(Rejected(CacheBudget(tokens=9, limit=8))),
    "no_chat_template": with_template(None),
    "template_limit": with_template("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}"),
    "invalid_api_key": with_request(headers={"Authorization": "Bearer sk-other"}),
    "unknown_url": with_request(path="/v2/completions"),
    "model_not_found": with_request(body=b'{"model": "gpt-7", "prompt": "x"}'),
    "method_not_allowed": with_request(method="PUT"),
    "request_timeout": slow,
    "request_too_large": with_request("gateway.max_body_bytes=1024", body=BODY + b" " * 1024),
    "unsupported_media_type": with_request(headers={"Content-Type": "text/xml"}),
    "expectation_failed": with_request(headers={"Expect": "the-unexpected"}),
    "too_many_requests": full,
    "engine_failed": with_terminal(Failed("non-finite logits at position 3")),
    "template_failed": with_template("{{ 3 ** (10 ** 8) }}"),
    "internal_error": broken,
    "draining": with_gate(is_draining=True),
    "fleet_ended": with_gate(has_ended=True),
    "engine_stalled": stalled,
    "template_lost": killed,
    "too_many_connections": no_place,
}


def table() -> dict[str, tuple[int, str, str]]:
    """Code -> status, header, its value ("" for any)."""
    rows = ROW.findall((ROOT / "docs" / "api.md").read_text())
    return {code: (int(status), header, value) for status, code, header, value in rows}


def test_the_table_has_all_codes_of_the_gateway_and_no_other() -> None:
    source = "".join(path.read_text() for path in (ROOT / "pegahpc" / "gateway").glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', source)) | set(re.findall(r'\b4\d\d: "(\w+)"', source))
    assert set(table()) == set(PROVOKE) == codes


@pytest.mark.parametrize("code", PROVOKE)
async def test_each_code_has_its_status_its_headers_and_openais_body(
    code: str, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, header, value = table()[code]
    got = await PROVOKE[code](House(serve, tmp_path, monkeypatch))
    assert (got.status, got.body["error"]["code"]) == (status, code)
    assert set(got.body) == {"error"} and set(got.body["error"]) == {"message", "type", "param", "code"}
    assert got.headers["Content-Type"] == "application/json"
    assert len(got.headers["X-Request-Id"]) == 32
    if header:
        assert got.headers[header.title()] == value or (not value and got.headers[header.title()])
    assert ("Retry-After" in got.headers) == (status in (429, 503))
