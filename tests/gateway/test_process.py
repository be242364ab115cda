"""The process that the launcher starts: its document on stdin, its line on stdout, its end on SIGTERM."""

import contextlib
import fcntl
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from pegahpc.config import FleetConfig
from pegahpc.parent_death import die_with_parent
from pegahpc.wire.keys import FleetSecret
from tests.gateway.fake_engine import FakeEngine, updates_for


class Gateway:
    """One gateway process under test."""

    def __init__(self, document: dict[str, object], *, num_files: int | None = None) -> None:
        command = [sys.executable, "-P", "-m", "pegahpc.gateway.main"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=die_with_parent)
        assert self.process.stdin is not None
        if num_files is not None:  # it reads its document first
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (num_files, num_files))
        self.process.stdin.write(msgspec.msgpack.encode(document))
        self.process.stdin.close()

    def listening(self) -> str:
        assert self.process.stdout is not None
        while (line := json.loads(self.process.stdout.readline()))["event"] == "beat":
            continue
        assert line["event"] == "listening"
        return "http://{}:{}".format(line["host"], line["port"])

    def end(self, within_s: float = 15.0) -> tuple[int, str]:
        try:
            status = self.process.wait(within_s)
        finally:
            self.process.kill()
        assert self.process.stdout is not None and self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            return status, self.process.stderr.read().decode()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    secret = FleetSecret.create()
    secret.save(tmp_path / "secret")
    fake = FakeEngine(0, secret)
    yield fake
    fake.close()


@pytest.fixture
def document(engine: FakeEngine, tmp_path: Path, fleet_of: Callable[..., FleetConfig]) -> dict[str, object]:
    return {
        "fleet": fleet_of(),
        "endpoints": [engine.endpoint],
        "secret_path": str(tmp_path / "secret"),
        "host": "127.0.0.1",
        "port": 0,
    }


def ask(url: str, path: Path) -> tuple[int, str]:
    headers = {"Authorization": "Bearer " + FleetSecret.load(path).api_key}
    data = b'{"model": "tiny-moe", "prompt": "x"}'
    request = urllib.request.Request(url + "/v1/completions", data=data, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_serves_and_drains_on_sigterm_with_status_zero(
    document: dict[str, object], engine: FakeEngine, tmp_path: Path
) -> None:
    gateway = Gateway(document)
    url = gateway.listening()
    engine.pause_s = 0.2
    engine.script = lambda request: updates_for(request, [[70]] * 4 + [[2]])
    answers: list[tuple[int, str]] = []
    running = threading.Thread(target=lambda: answers.append(ask(url, tmp_path / "secret")))
    running.start()
    engine.wait_for_request()
    gateway.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert ask(url, tmp_path / "secret")[0] == 503
    running.join()
    status, _ = gateway.end()
    assert answers[0][0] == 200
    assert status == 0


@contextmanager
def stream_of(url: str, path: Path) -> Iterator[http.client.HTTPResponse]:
    """An answer in events, of which nothing is read yet."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    headers = {"Authorization": "Bearer " + FleetSecret.load(path).api_key}
    connection.request("POST", "/v1/completions", b'{"model": "tiny-moe", "prompt": "x", "stream": true}', headers)
    with closing(connection), connection.getresponse() as response:
        yield response


@pytest.mark.parametrize("is_draining", [False, True])
def test_when_the_fleet_fails_everyone_is_told_at_once_and_it_ends(
    document: dict[str, object], engine: FakeEngine, tmp_path: Path, is_draining: bool
) -> None:
    gateway = Gateway(document)
    url, secret = gateway.listening(), tmp_path / "secret"
    engine.is_holding = True
    engine.script = lambda request: updates_for(request, [[70]] * 3)
    answers: list[tuple[int, str]] = []
    whole = threading.Thread(target=lambda: answers.append(ask(url, secret)))
    whole.start()
    with stream_of(url, secret) as streamed:
        assert b"text_completion" in streamed.readline()
        engine.wait_for_request(2)
        if is_draining:
            gateway.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        began_s = time.monotonic()
        gateway.process.send_signal(signal.SIGUSR1)
        rest = streamed.read().decode()
    whole.join()
    status, log = gateway.end()
    assert time.monotonic() - began_s < 1
    last = json.loads(rest.strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["message"] == "The fleet has ended: one of its processes failed."
    assert answers[0][0] == 500 and json.loads(answers[0][1])["error"] == last["error"]
    assert status == 1 and "2 open requests are told so" in log


def test_when_the_fleet_fails_a_client_that_does_not_read_holds_nothing_up(
    document: dict[str, object], engine: FakeEngine, tmp_path: Path
) -> None:
    gateway = Gateway(document)
    url, secret = gateway.listening(), tmp_path / "secret"
    engine.is_holding = True
    engine.script = lambda request: updates_for(request, [[70] * 100] * 2000)
    with stream_of(url, secret):
        engine.wait_for_request()
        time.sleep(1.5)
        began_s = time.monotonic()
        gateway.process.send_signal(signal.SIGUSR1)
        status, _ = gateway.end()
        assert status == 1 and time.monotonic() - began_s < 1.2


def test_a_port_that_is_taken_is_named_and_ends_it_with_status_two(document: dict[str, object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, log = Gateway({**document, "port": port}).end()
    assert status == 2
    assert log.strip().splitlines() == [
        f"gateway.port: {port} is taken on 127.0.0.1; choose another, or gateway.port=0 for any free one"
    ]


def test_it_does_not_listen_before_the_rank_answers_and_leaves_on_sigterm_while_waiting(
    document: dict[str, object],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        gateway = Gateway({**document, "endpoints": [f"tcp://127.0.0.1:{deaf.getsockname()[1]}"]})
        time.sleep(2)
        assert gateway.process.poll() is None
        assert gateway.process.stdout is not None
        os.set_blocking(gateway.process.stdout.fileno(), False)
        assert set(gateway.process.stdout.read().splitlines()) == {b'{"event":"beat"}'}
        gateway.process.send_signal(signal.SIGTERM)
        status, log = gateway.end()
    assert status == 0, log


def test_it_beats_on_standard_output_from_start_to_end_and_a_reader_that_is_late_or_gone_holds_up_nothing(
    document: dict[str, object], tmp_path: Path
) -> None:
    gateway = Gateway(document)
    url = gateway.listening()
    assert gateway.process.stdout is not None
    began_s = time.monotonic()
    lines = [gateway.process.stdout.readline() for _ in range(4)]
    assert lines == [b'{"event":"beat"}\n'] * 4 and 0.5 < time.monotonic() - began_s < 5
    fcntl.fcntl(gateway.process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # 240 beats; it holds 4 a second
    with closing(os.fdopen(os.open(f"/proc/self/fd/{gateway.process.stdout.fileno()}", os.O_WRONLY), "wb")) as full:
        os.set_blocking(full.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while full.raw.write(b"x" * 4096):
                continue
    time.sleep(0.6)
    assert ask(url, tmp_path / "secret")[0] == 200
    gateway.process.stdout.close()
    time.sleep(0.6)
    assert ask(url, tmp_path / "secret")[0] == 200
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.process.wait(10) == 0
    assert gateway.process.stderr is not None
    gateway.process.stderr.close()


def test_a_model_folder_without_a_tokenizer_is_named(document: dict[str, object], tmp_path: Path) -> None:
    fleet = msgspec.msgpack.decode(msgspec.msgpack.encode(document["fleet"]), type=FleetConfig)
    fleet.model.path = str(tmp_path)
    status, log = Gateway({**document, "fleet": fleet}).end()
    assert status == 2
    assert "model.path" in log and "tokenizer.json" in log


def test_it_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, pegahpc.gateway.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
