"""The wire: a client with the fleet's key talks to a rank; strangers are refused and logged."""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.messages import Abort, Request, Sampling, ToRank, decode_to_rank, encode
from pegahpc.wire.sockets import RankSocket, connect_to_rank


@pytest.fixture
def secret() -> FleetSecret:
    return FleetSecret.create()


@pytest.fixture
def rank(secret: FleetSecret) -> Iterator[RankSocket]:
    with RankSocket("127.0.0.1", secret) as bound:
        yield bound


def take(rank: RankSocket, within_s: float = 5.0) -> tuple[bytes, bytes] | None:
    return rank.receive() if rank.wait(within_s * 1000) else None


async def test_a_request_arrives_whole_and_its_answer_goes_back_to_its_client(
    rank: RankSocket, secret: FleetSecret
) -> None:
    context = zmq.asyncio.Context()
    socket = connect_to_rank(context, rank.endpoint, secret)
    sent: ToRank = Request(id="a", prompt_tokens=[1, 2], max_tokens=3, sampling=Sampling(seed=2**64 - 1))
    await socket.send(encode(sent))
    received = await asyncio.to_thread(take, rank)
    assert received is not None
    client, payload = received
    assert decode_to_rank(payload) == sent
    rank.send(client, b"answer")
    assert await asyncio.wait_for(socket.recv(), 5) == b"answer"
    socket.close()
    context.term()


async def test_a_client_without_the_fleets_key_gets_nothing_through(
    rank: RankSocket, secret: FleetSecret, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = FleetSecret.create()
    public, private = stranger.client_public, stranger.client_secret
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.curve_serverkey = secret.server_public  # even with the rank's public key in hand
    socket.curve_publickey, socket.curve_secretkey = public, private
    socket.connect(rank.endpoint)
    with caplog.at_level(logging.WARNING):
        await socket.send(encode(Abort("a")))
        assert await asyncio.to_thread(take, rank, 1.0) is None
    assert "refused a handshake" in caplog.text
    socket.close()
    context.term()


def test_bytes_that_are_no_handshake_are_dropped_and_the_rank_goes_on(
    rank: RankSocket, secret: FleetSecret, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = rank.endpoint.removeprefix("tcp://").split(":")
    with caplog.at_level(logging.WARNING), socket.create_connection((host, int(port))) as tcp:
        tcp.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        assert take(rank, 0.5) is None
        deadline = time.monotonic() + 5
        while "refused a handshake" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "refused a handshake" in caplog.text


async def test_a_client_that_is_gone_is_told_of_and_others_are_not_disturbed(
    rank: RankSocket, secret: FleetSecret
) -> None:
    with pytest.raises(ConnectionError, match="the client is gone"):
        rank.send(b"nobody", b"x")
    context = zmq.asyncio.Context()
    first, second = (connect_to_rank(context, rank.endpoint, secret) for _ in range(2))
    for each in (first, second):
        await each.send(b"hello")
    names = []
    for _ in range(2):
        received = await asyncio.to_thread(take, rank)
        assert received is not None
        names.append(received[0])
    gone, here = names if names[0] == first.getsockopt(zmq.IDENTITY) else names[::-1]
    first.close()
    deadline = time.monotonic() + 5
    with pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            rank.send(gone, b"x")
            time.sleep(0.01)
    rank.send(here, b"still there")
    assert await asyncio.wait_for(second.recv(), 5) == b"still there"
    second.close()
    context.term()


def test_the_secret_is_readable_by_its_owner_only(tmp_path: Path, secret: FleetSecret) -> None:
    path = tmp_path / "secret"
    secret.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert FleetSecret.load(path) == secret
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="lets others read"):
        FleetSecret.load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_signature_holds_for_its_nonce_and_payload_alone(secret: FleetSecret) -> None:
    mac = secret.sign(b"n" * 32, b"payload")
    assert secret.is_signed(b"n" * 32, b"payload", mac)
    assert not secret.is_signed(b"m" * 32, b"payload", mac)
    assert not secret.is_signed(b"n" * 32, b"payloaD", mac)
    assert not FleetSecret.create().is_signed(b"n" * 32, b"payload", mac)
