"""A rank whose link to its tray is broken ends, and says so in its log."""

import socket
import struct
import subprocess
import sys

import msgspec
import pytest

from pegahpc.config import compose_fleet
from pegahpc.launch.messages import RankBoot
from pegahpc.rank import RankContext

RANK = """
import logging, socket, sys, time
from pegahpc.launch.rank_link import RankLink
logging.basicConfig(level=logging.INFO)
link = RankLink(socket.socket(fileno=0))
if sys.argv[1] == "blind":
    link.publish(lambda: 1 // 0)
time.sleep(60)
"""


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def boot() -> bytes:
    context = RankContext(rank=3, world_size=4, tray=1, num_trays=2, local_rank=1, device="cpu", bind_host="127.0.0.1")
    document = RankBoot(context=context, fleet=compose_fleet([]), num_experts=16, secret_path="/nowhere")
    return msgspec.msgpack.encode(document)


@pytest.mark.parametrize(
    ("act", "sent", "says"),
    [
        ("hear", frame(b"junk"), "the tray sent what is no message"),
        ("hear", struct.pack(">I", 1 << 30), "the tray sent what is no message"),
        ("hear", b"\x00\x00", "the tray sent what is no message: the connection closed within a frame"),
        ("blind", b"", "its link failed with ZeroDivisionError"),
    ],
)
def test_a_rank_with_a_broken_link_ends_and_logs_why(act: str, sent: bytes, says: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        rank = subprocess.Popen([sys.executable, "-P", "-c", RANK, act], stdin=theirs.fileno(), stderr=subprocess.PIPE)
    with ours:
        ours.sendall(frame(boot()) + sent)
        if act == "hear":
            ours.shutdown(socket.SHUT_WR)
        _, said = rank.communicate(timeout=20)
    assert rank.returncode == 1
    assert f"rank 3 ends: {says}" in said.decode()
