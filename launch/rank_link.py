"""A rank's conversation with its tray: one thread that hears orders and publishes the status block."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from pegahpc.launch.frames import BlockingFrames, FrameError
from pegahpc.launch.messages import (
    HEARTBEAT_S,
    Go,
    Loss,
    Progress,
    Pulse,
    RankBoot,
    RankRecord,
    RankToTray,
    Ready,
    Stop,
    Store,
    World,
    decode_rank_boot,
    decode_to_rank,
    encode,
)

log = logging.getLogger(__name__)


def take_stdin() -> socket.socket:
    """The socket that is standard input, kept from all that this process starts.

    A compiler that still held it would hide from the tray that the rank has ended.
    """
    connection = socket.socket(fileno=os.dup(0))  # which is not inherited
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return connection


class RankLink:
    """The rank's end of the socket that its tray gave it as standard input.

    A rank whose tray is gone has no purpose and nobody to tell: it ends at once.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._frames = BlockingFrames(connection)
        document = self._frames.receive()
        if document is None:
            raise SystemExit("the tray ended before it said what to do")
        self.boot: RankBoot = decode_rank_boot(document)
        self._rank = self.boot.context.rank
        self._read_pulse: Callable[[], Pulse] | None = None
        self._heard = threading.Condition()
        self._world: World | None = None
        self._store: Store | None = None
        self._is_going = self._is_stopping = False
        threading.Thread(target=self._converse, name="rank-link", daemon=True).start()

    def send(self, message: RankToTray) -> None:
        """Tell the tray."""
        self._frames.send(encode(message))

    def join(self, record: RankRecord) -> None:
        """Announce the rank's addresses."""
        self.send(record)

    def report(self, stage: str, fraction: float) -> None:
        """Say how far loading is."""
        self.send(Progress(rank=self._rank, stage=stage, fraction=fraction))

    def complain(self, reason: str, weight: int) -> None:
        """Say in one line why the rank is about to end."""
        self.send(Loss(rank=self._rank, pid=os.getpid(), reason=reason, weight=weight))

    def publish(self, read_pulse: Callable[[], Pulse]) -> None:
        """From now on send the status block four times a second."""
        self._read_pulse = read_pulse

    def wait_for_world(self, timeout_s: float) -> World:
        """Block until the rendezvous is over.

        Raises:
            TimeoutError: it was not within `timeout_s`.
        """
        self._wait(lambda: self._world is not None, timeout_s, "the rendezvous")
        assert self._world is not None
        return self._world

    def wait_for_store(self, timeout_s: float) -> Store:
        """Block until rank 0 has opened the collectives' store; TimeoutError as above."""
        self._wait(lambda: self._store is not None, timeout_s, "rank 0's store")
        assert self._store is not None
        return self._store

    def wait_to_go(self, timeout_s: float) -> bool:
        """Say that the rank is ready and block until all are; False when the fleet stops instead."""
        self.send(Ready(rank=self._rank))
        self._wait(lambda: self._is_going or self._is_stopping, timeout_s, "the other ranks to be ready")
        return self._is_going

    def is_stopping(self) -> bool:
        """Whether the fleet was told to stop."""
        return self._is_stopping

    def _wait(self, has_come: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._heard:
            if not self._heard.wait_for(has_come, timeout_s):
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")

    def _converse(self) -> None:
        """The thread: a rank that can no longer be told anything, or shows no pulse, must not live on."""
        try:
            self._hear_and_publish()
        except (FrameError, msgspec.DecodeError) as error:
            self._end(f"the tray sent what is no message: {error}")
        except Exception as error:  # the thread's border: it is logged, and ends the rank
            log.exception("rank %d: its link failed", self._rank)
            self._end(f"its link failed with {type(error).__name__}: {error}")

    def _hear_and_publish(self) -> None:
        due_s = time.monotonic()
        while True:
            readable, _, _ = select.select([self._frames], [], [], max(0.0, due_s - time.monotonic()))
            if readable:
                self._hear()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + HEARTBEAT_S
                if self._read_pulse is not None:
                    self._send_pulse(self._read_pulse())

    def _send_pulse(self, pulse: Pulse) -> None:
        try:
            self.send(pulse)
        except OSError:
            self._end("the tray is gone")

    def _hear(self) -> None:
        try:
            payload = self._frames.receive()
        except OSError:
            payload = None
        if payload is None:
            self._end("the tray closed its end")
            return
        message = decode_to_rank(payload)
        with self._heard:
            match message:
                case World():
                    self._world = message
                case Store():
                    self._store = message
                case Go():
                    self._is_going = True
                case Stop():
                    self._is_stopping = True
            self._heard.notify_all()

    def _end(self, reason: str) -> None:
        log.error("rank %d ends: %s", self._rank, reason)
        logging.shutdown()
        os._exit(1)  # the engine's thread may sit in a collective that never returns
