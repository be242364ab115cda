"""A stranger on every port: without the key nothing is accepted, and the fleet answers all the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from pegahpc.launch.endpoint import Endpoint, EndpointError
from pegahpc.moe.fabric import FabricPort, SlabShape, fetch
from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.messages import Attach, Request, encode
from tests.fleet.live_fleet import ANSWER, LiveFleet, files_of
from tests.fleet.strangers import Strangers

pytestmark = pytest.mark.slow

NUM_QUESTIONS = 10
A_SECOND = 200


@pytest.fixture(scope="module", params=["fabric", "torch"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    fleet = LiveFleet(tmp_path_factory.mktemp(request.param), "topology=ep2", f"engine.dispatcher={request.param}")
    fleet.when_ready()
    yield fleet
    fleet.end()


def listening(fleet: LiveFleet) -> dict[tuple[str, int], str]:
    """Every TCP port that a process of the fleet listens on, by the kernel's word, and whose it is."""
    return {
        (connection.laddr.ip, connection.laddr.port): who
        for who, pid in fleet.who().items()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def known(fleet: LiveFleet) -> list[tuple[str, int]]:
    """The ports that have keys."""
    addresses = [address.rsplit(":", 1) for _, address in fleet.record().ports()]
    return [(host, int(port)) for host, port in addresses]


def ask(fleet: LiveFleet) -> float:
    """The time that the known questions take; every one is answered."""
    began_s = time.monotonic()
    assert [fleet.answers() for _ in range(NUM_QUESTIONS)] == [ANSWER] * NUM_QUESTIONS
    return time.monotonic() - began_s


def test_what_torch_opens_is_on_the_interface_and_all_else_has_a_key(fleet: LiveFleet) -> None:
    ports = listening(fleet)
    assert set(known(fleet)) <= set(ports)
    assert {host for host, _ in ports} == {"127.0.0.1"}
    unknown = {who for address, who in ports.items() if address not in known(fleet)}
    assert unknown <= ({"rank 0", "rank 1"} if "torch" in str(fleet.folder) else set())


def test_every_question_is_answered_while_strangers_knock_at_every_port(fleet: LiveFleet) -> None:
    ask(fleet)
    alone_s = ask(fleet)
    record, sizes = fleet.record(), log_bytes(fleet)
    with Strangers(known(fleet), a_second=A_SECOND) as strangers:
        began_s = time.monotonic()
        besieged_s = ask(fleet)
        while time.monotonic() - began_s < 3:
            besieged_s = ask(fleet)
        num_came, took_s = strangers.num_came, time.monotonic() - began_s
    print(
        f"{NUM_QUESTIONS} questions: {alone_s:.2f} s alone, {besieged_s:.2f} s with {num_came / took_s:.0f} strangers/s"
        f" ({besieged_s / alone_s:.2f}x); logs grew by {(log_bytes(fleet) - sizes) / num_came:.0f} bytes a stranger"
    )
    assert num_came > A_SECOND
    after = fleet.record()
    assert (after.state, after.run_id) == ("ready", record.run_id)
    assert fleet.answers() == ANSWER


def log_bytes(fleet: LiveFleet) -> int:
    return sum(path.stat().st_size for path in (fleet.folder / "logs").iterdir())


@pytest.mark.parametrize("key", [None, "", "pega-wrong", "é"])
def test_without_the_key_the_gateway_says_401(fleet: LiveFleet, key: str | None) -> None:
    url, _ = fleet.address()
    stranger = Endpoint(url, key and key.encode().decode("latin-1"))
    for path in ("/metrics", "/v1/models", "/no/such/path"):
        with pytest.raises(EndpointError) as refused:
            stranger.get(path)
        assert refused.value.status == 401
    with pytest.raises(EndpointError) as refused:
        stranger.chat({})
    assert refused.value.status == 401


@pytest.mark.parametrize("kind", ["no key", "own keys"])
def test_without_the_key_a_rank_says_nothing(fleet: LiveFleet, kind: str) -> None:
    secret = FleetSecret.load(fleet.folder / "secret")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if kind == "own keys":  # and the server's public one, which is no secret
            stranger.curve_serverkey = secret.server_public
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(fleet.record().ranks[0].endpoint)
        stranger.send(encode(Attach()))
        stranger.send(encode(Request(id="x", prompt_tokens=[1], max_tokens=1)))
        assert stranger.poll(1000) == 0


SIT = """
import os, socket, sys, time
os.setuid(65534)
held = []
print("here", flush=True)
while True:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\\0" + sys.argv[1])
    except OSError:
        break
    held.append(connection)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be somebody else")
def test_another_user_who_sits_on_a_fabric_port_does_not_keep_the_peers_waiting() -> None:
    shape = SlabShape(world_size=2, num_local_experts=1, max_pairs=4, hidden=4, dtype=torch.float32)
    port = FabricPort(0, shape)
    name = port.address.split(":")[0]
    with subprocess.Popen([sys.executable, "-c", SIT, name], stdout=subprocess.PIPE) as sitter:
        try:
            assert sitter.stdout is not None
            assert sitter.stdout.readline() == b"here\n"
            time.sleep(0.3)
            began_s = time.monotonic()
            assert fetch(port.address, own_rank=1, shape=shape, timeout_s=20).slab.door
            assert time.monotonic() - began_s < 1
        finally:
            sitter.send_signal(signal.SIGKILL)


def test_a_fabric_port_is_closed_when_all_peers_have_come(fleet: LiveFleet) -> None:
    names = Path("/proc/net/unix").read_text()
    for pid in fleet.who().values():
        files = files_of(pid)
        held = [line for line in names.splitlines() if f"socket:[{line.split()[6]}]" in files]
        assert not [line for line in held if "@pegahpc" in line]
