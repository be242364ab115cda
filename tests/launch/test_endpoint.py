"""The terminal's client against endpoints that misbehave."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pegahpc.config import ConfigError
from pegahpc.launch.chat import Conversation, converse
from pegahpc.launch.endpoint import Endpoint, EndpointError, address_of
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.record import GatewayEntry, new_record

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO = b'data: {"choices":[{"index":0,"delta":{"content":"hello"}}]}\n\n'
FAILED = b'data: {"error":{"message":"the fleet has ended"}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def answering(*answers: bytes) -> Iterator[Endpoint]:
    """An endpoint that gives each connection its bytes and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # to close with bytes unread would be a reset
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "key")
        thread.join()


def test_a_stream_is_told_piece_by_piece_until_its_end_mark() -> None:
    with answering(HEAD + chunk(HELLO) + chunk(HELLO + DONE) + b"0\r\n\r\n") as endpoint:
        pieces = [event["choices"][0]["delta"]["content"] for event in endpoint.stream({})]
    assert pieces == ["hello", "hello"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (HEAD + chunk(HELLO), "broke off"),
        (HEAD + chunk(HELLO) + b"0\r\n\r\n", "broke off"),
        (HEAD + chunk(HELLO + FAILED) + b"0\r\n\r\n", "the fleet has ended"),
        (b'HTTP/1.1 503 X\r\nContent-Length: 32\r\n\r\n{"error":{"message":"draining"}}', "draining"),
        (b"HTTP/1.1 503 X\r\nContent-Length: 9\r\n\r\n{}", "IncompleteRead"),
        (HEAD + chunk(b"data: {\n\n") + b"0\r\n\r\n", "127.0.0.1:.*truncated"),
        (b"HTTP/1.1 502 X\r\nContent-Length: 5\r\n\r\nproxy", "proxy"),
        (b"garbage\r\n\r\n", "garbage"),
        (b"", "127.0.0.1:"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_in_words(answer: bytes, says: str) -> None:
    with answering(answer) as endpoint, pytest.raises(EndpointError, match=says):
        list(endpoint.stream({}))


def test_nobody_there_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EndpointError, match="refused"):
        Endpoint(f"http://127.0.0.1:{port}/v1", None).get("/health")


def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    good = HEAD + chunk(HELLO + DONE) + b"0\r\n\r\n"
    lines = iter(["first", "second", "/reset", "third", "/quit"])
    shown: list[str] = []
    with answering(good, HEAD + chunk(FAILED), good) as endpoint:
        conversation = Conversation(endpoint, "m", system="be brief", settings={})
        converse(conversation, lambda: next(lines), shown.append)
    said = "".join(shown)
    assert said.count("hello\n") == 2
    assert "[the fleet has ended; /reset starts anew]" in said


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80"])
def test_a_damaged_secret_is_refused_by_its_path(tmp_path: Path, content: bytes) -> None:
    record = new_record(name="a", run_id="r", model="m", launcher=ProcessId.own())
    record.state, record.gateway = "ready", GatewayEntry(process=ProcessId.own(), url="http://127.0.0.1:1/v1")
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=f"fleet.home: the secret {tmp_path}/secret cannot be read: "):
        address_of(tmp_path, record)
