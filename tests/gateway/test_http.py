"""What surrounds every answer: methods, bodies as they are uploaded, request ids, browsers of other origins."""

import asyncio
import gzip
import time
from contextlib import closing

import pytest

from pegahpc.gateway import uploads
from pegahpc.wire.messages import Failed, RequestUpdate
from tests.gateway.conftest import Serve, Served
from tests.gateway.fake_engine import updates_for
from tests.gateway.test_connections import address_of

BODY = b'{"model": "tiny-moe", "prompt": "x"}'
PAGE = "https://chat.example.org"


async def test_methods_that_a_path_does_not_take_are_named_beside_those_that_it_takes(served: Served) -> None:
    for method, path, allowed in [
        ("GET", "/v1/completions", {"POST"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
        ("OPTIONS", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/models/tiny-moe", {"GET", "HEAD"}),
        ("POST", "/metrics", {"GET", "HEAD"}),
    ]:
        async with served.http.request(method, served.url + path) as response:
            assert response.status == 405, path
            assert set(response.headers["Allow"].split(",")) == allowed
            assert response.content_type == "application/json"


async def test_head_is_get_without_the_body(served: Served) -> None:
    for path in ("/health", "/v1/models", "/v1/models/tiny-moe", "/metrics", "/v1/models/gpt-7"):
        async with served.http.get(served.url + path) as response:
            expected = response.status, response.content_type
        async with served.http.head(served.url + path) as response:
            assert (response.status, response.content_type) == expected
            assert await response.read() == b""


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=UTF-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 200),  # what curl -d says
        ("application/octet-stream", 200),
        ("application/json; charset=latin-1", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain", 415),
    ],
)
async def test_a_body_is_json_whatever_a_tool_calls_it_unless_it_says_that_it_is_not(
    served: Served, kind: str | None, status: int
) -> None:
    skip = ["Content-Type"] if kind is None else []
    headers = {} if kind is None else {"Content-Type": kind}
    async with served.http.post(
        served.url + "/v1/completions", data=BODY, headers=headers, skip_auto_headers=skip
    ) as response:
        assert response.status == status


async def test_a_body_is_decompressed_and_its_bound_is_of_what_comes_out(serve: Serve) -> None:
    async with serve("gateway.max_body_bytes=4096") as served:
        for data, coding, status in [
            (gzip.compress(BODY), "gzip", 200),
            (gzip.compress(b" " * (200 << 20)), "gzip", 413),
            (b"x", "lzma", 415),
        ]:
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            began_s = time.monotonic()
            async with served.http.post(served.url + "/v1/completions", data=data, headers=headers) as response:
                assert response.status == status, coding
            assert time.monotonic() - began_s < 2


async def test_a_client_that_asks_first_uploads_only_what_may_come(serve: Serve) -> None:
    async with serve("gateway.max_body_bytes=1024") as served:
        for size, first in ((len(BODY), b"HTTP/1.1 100 Continue"), (1 << 30, b"HTTP/1.1 413 Request Entity Too Large")):
            reader, writer = await asyncio.open_connection(*address_of(served.url))
            with closing(writer):
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                    b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (served.key.encode(), size)
                )
                assert (await asyncio.wait_for(reader.readline(), 5)).strip() == first
                if size == len(BODY):
                    writer.write(BODY)
                    assert b"HTTP/1.1 200 OK\r\n" in await reader.readuntil(b"\r\n\r\n")


async def test_a_slow_upload_holds_no_place_and_is_over_in_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BODY_S", 0.5)
    async with serve("gateway.max_concurrent_requests=1") as served:
        reader, writer = await asyncio.open_connection(*address_of(served.url))
        with closing(writer):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 99\r\n\r\n{"
                % served.key.encode()
            )
            answered = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            assert (await served.complete())[0] == 200
            while not answered.done():  # a byte now and then does not help
                writer.write(b" ")
                await asyncio.sleep(0.1)
            assert (await answered).startswith(b"HTTP/1.1 408 ")


async def test_a_failure_is_logged_with_the_ids_that_client_and_ranks_know_it_by(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.script = lambda request: [RequestUpdate(id=request.id, terminal=Failed("non-finite logits"))]
    for _ in range(9):
        headers = {"X-Request-Id": "job-17/3"}
        async with served.http.post(
            served.url + "/v1/completions", json={"model": "tiny-moe", "prompt": "x"}, headers=headers
        ) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (500, "job-17/3")
    lines = [record.getMessage() for record in caplog.records if record.name == "pegahpc.gateway.app"]
    assert len(lines) == 5
    name = served.engine.requests[0].id.split(":")[0]
    assert lines[0] == f"request job-17/3 ({name}) POST /v1/completions: 500 engine_failed: non-finite logits"


async def test_a_stream_that_breaks_is_logged_too_and_a_clients_fault_is_not(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.pause_s = 0.05
    served.engine.script = lambda request: [
        updates_for(request, [[70], [2]])[0],
        RequestUpdate(id=request.id, terminal=Failed("non-finite logits")),
    ]
    body = {"model": "tiny-moe", "prompt": "x", "stream": True}
    async with served.http.post(served.url + "/v1/completions", json=body) as response:
        assert response.status == 200 and b'data: {"error":' in await response.read()
        name = response.headers["X-Request-Id"]
    await served.complete(suffix="x")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "pegahpc.gateway.app"]
    assert line.startswith(f"request {name} (cmpl-") and line.endswith("500 engine_failed: non-finite logits")


async def test_by_default_no_answer_has_a_cors_header_and_a_preflight_is_a_stranger(served: Served) -> None:
    headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    for method, path, status in (("GET", "/v1/models", 200), ("GET", "/health", 200), ("OPTIONS", "/v1/models", 405)):
        async with served.http.request(method, served.url + path, headers=headers) as response:
            assert response.status == status
            assert not [name for name in response.headers if name.startswith("Access-Control")]
    async with served.http.options(served.url + "/v1/models", headers={**headers, "Authorization": ""}) as response:
        assert response.status == 401


async def test_pages_of_the_origins_that_are_named_may_read_answers_errors_and_streams(serve: Serve) -> None:
    async with serve(f"gateway.cors_origins=[{PAGE},http://localhost:3000]") as served:
        served.engine.script = lambda request: updates_for(request, [[70], [2]])
        ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Authorization": ""}
        ask["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
        async with served.http.options(served.url + "/v1/chat/completions", headers=ask) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == ask["Access-Control-Request-Headers"]
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        for stream in (False, True):
            body = {"model": "tiny-moe", "prompt": "x", "stream": stream}
            async with served.http.post(
                served.url + "/v1/completions", json=body, headers={"Origin": PAGE}
            ) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert "Origin" in response.headers["Vary"]
        async with served.http.get(served.url + "/nothing", headers={"Origin": PAGE, "Authorization": ""}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, PAGE)
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]


async def test_pages_of_other_origins_get_nothing(serve: Serve) -> None:
    async with serve(f"gateway.cors_origins=[{PAGE}]") as served:
        for origin in ("https://evil.example.org", f"{PAGE}.evil.org", PAGE.upper(), "null", ""):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Authorization": ""}
            async with served.http.options(served.url + "/v1/completions", headers=headers) as response:
                assert response.status == 401
                assert not [name for name in response.headers if name.startswith("Access-Control")]


async def test_a_star_is_every_origin(serve: Serve) -> None:
    headers = {"Origin": "https://any.org"}
    async with (
        serve("gateway.cors_origins=['*']") as served,
        served.http.get(served.url + "/health", headers=headers) as got,
    ):
        assert got.headers["Access-Control-Allow-Origin"] == "*"
