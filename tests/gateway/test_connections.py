"""What somebody without a key can do to the port: nothing that lasts, nothing that fills a log."""

import asyncio
import errno
import http.client
import json
import logging
import select
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from pegahpc.gateway import connections
from pegahpc.limited_log import LimitedLog
from tests.gateway.conftest import Serve, Served
from tests.gateway.fake_engine import FakeEngine, updates_for
from tests.gateway.test_process import Gateway, ask, document, engine, stream_of  # noqa: F401 (fixtures)

NUM_FILES = 300  # of the gateway
NUM_HELD = 500
HALF_A_HEADER = b"GET /health HTTP/1.1\r\nX: "


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def held(url: str, num_sockets: int, data: bytes = HALF_A_HEADER) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        sockets = []
        for _ in range(num_sockets):
            client = stack.enter_context(socket.create_connection(address_of(url), timeout=10))
            client.sendall(data)
            sockets.append(client)
        yield sockets


def health_s(url: str) -> float:
    """Seconds that /health takes on a new connection."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began_s = time.monotonic()
    with opener.open(url + "/health", timeout=10) as response:
        assert response.status == 200
    return time.monotonic() - began_s


def answer_to(url: str, data: bytes) -> tuple[str, dict[str, dict[str, str]]]:
    """The status line and the document with which raw bytes are answered."""
    with socket.create_connection(address_of(url), timeout=10) as client:
        client.sendall(data)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().splitlines()[0], json.loads(body)


def test_half_headers_in_every_file_keep_nobody_out_and_fill_no_log(
    document: dict[str, object],  # noqa: F811
    engine: FakeEngine,  # noqa: F811
    tmp_path: Path,
) -> None:
    gateway = Gateway(document, num_files=NUM_FILES)
    url, secret = gateway.listening(), tmp_path / "secret"
    engine.is_holding = True
    engine.script = lambda request: updates_for(request, [[70]] * 3)
    with stream_of(url, secret) as streamed:
        assert b"text_completion" in streamed.readline()
        with held(url, NUM_HELD):
            for _ in range(5):
                assert health_s(url) < 2
                time.sleep(0.2)
            engine.is_holding = False
            assert ask(url, secret)[0] == 200
        assert engine.aborts == []  # whoever has a key keeps the connection
    gateway.process.terminate()
    status, log = gateway.end()
    assert status == 0
    assert len(log) < 20_000
    assert "a quiet one without a key is dropped" in log and "Traceback" not in log


async def test_a_header_that_does_not_end_is_cut_off_and_a_client_with_a_key_is_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STRANGER_S", 0.3)
    monkeypatch.setattr(connections, "SWEEP_S", 0.1)
    await asyncio.sleep(1.1)  # the sweep's first turn was of the old length
    began_s = time.monotonic()
    for data in (b"", HALF_A_HEADER, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + HALF_A_HEADER):
        reader, writer = await asyncio.open_connection(*address_of(served.url))
        writer.write(data)
        async with asyncio.timeout(2):
            await _read_to_end(reader)
        writer.close()
    assert 0.9 < time.monotonic() - began_s < 3
    assert await asyncio.to_thread(keeps_its_connection, served, pause_s=0.8)


def keeps_its_connection(served: Served, *, pause_s: float) -> bool:
    with closing(http.client.HTTPConnection(*address_of(served.url), timeout=10)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {served.key}"})
        with connection.getresponse() as response:
            assert response.status == 200 and response.read()
        time.sleep(pause_s)
        return not select.select([connection.sock], [], [], 0)[0]  # else its end can be read


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    try:
        await reader.read()
    except ConnectionResetError:
        return


async def test_when_all_places_are_of_clients_with_a_key_another_is_refused_at_once(serve: Serve) -> None:
    async with serve(max_connections=2) as served:
        served.engine.is_holding = True
        tasks = [asyncio.create_task(served.complete()) for _ in range(2)]
        await asyncio.to_thread(served.engine.wait_for_request, 2)
        status, body = await asyncio.to_thread(answer_to, served.url, b"")
        assert " 503 " in status
        assert body["error"]["code"] == "too_many_connections"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_being_out_of_files_is_a_line_and_a_pause_and_then_it_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_tries = 0
    real = socket.socket.accept

    def fail(self: socket.socket) -> tuple[socket.socket, object]:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", fail)
    async with asyncio.timeout(3):
        async with served.http.get(served.url + "/health") as response:
            assert response.status == 200
    assert caplog.text.count("Too many open files") == 4
    assert "Traceback" not in caplog.text


BROKEN = {
    "a long header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "a length that is none": b"POST /v1/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    "a length below zero": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=list(BROKEN))
async def test_what_is_no_http_is_answered_as_openai_would_and_is_one_line(
    served: Served, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    caplog.set_level(logging.INFO)
    status, body = await asyncio.to_thread(answer_to, served.url, data)
    assert " 400 " in status
    assert body["error"]["code"] == "invalid_http"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) < 300
    assert "Traceback" not in caplog.text
    assert len(caplog.records) == 1 and len(caplog.records[0].getMessage()) < 300


async def test_broken_compression_with_the_key_is_an_openai_error_without_a_traceback(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with served.http.post(served.url + "/v1/completions", data=b"nonsense" * 9, headers=headers) as response:
        assert response.status == 400
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in caplog.text


async def test_a_hundred_broken_requests_are_five_lines(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(100):
        await asyncio.to_thread(answer_to, served.url, BROKEN["no HTTP"])
    assert len(caplog.records) == 5


def test_what_a_minute_had_too_much_of_is_counted_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    limited = LimitedLog(logging.getLogger("t"), num_lines=2, clock=lambda: now_s)
    for _ in range(5):
        limited.write(logging.WARNING, "a", "of kind a")
    limited.write(logging.WARNING, "b", "of kind b")
    now_s = 59.0
    limited.end_windows()
    assert [record.getMessage() for record in caplog.records] == ["of kind a", "of kind a", "of kind b"]
    now_s = 61.0
    limited.write(logging.WARNING, "a", "of kind a again")
    assert [record.getMessage() for record in caplog.records[3:]] == ["a: suppressed 3", "of kind a again"]
