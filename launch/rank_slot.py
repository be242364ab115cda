"""One rank as its tray sees it: the process, the socket to it, and what it last said."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import msgspec

from pegahpc.launch.boot import TrayBoot
from pegahpc.launch.children import Child, Program, clean_environment
from pegahpc.launch.frames import FrameStream
from pegahpc.launch.journal import log_path
from pegahpc.launch.messages import (
    Pulse,
    RankBoot,
    RankRecord,
    RankToTray,
    TrayToRank,
    decode_from_rank,
    encode,
)


class RankSlot:
    """A rank process of this tray."""

    def __init__(self, child: Child, stream: FrameStream, rank: int) -> None:
        self.child = child
        self.rank = rank
        self.record: asyncio.Future[RankRecord] = asyncio.get_running_loop().create_future()
        self.has_complained = False
        self._stream = stream
        self._pulse: Pulse | None = None
        self._pulse_s = 0.0

    @classmethod
    async def start(cls, tray: TrayBoot, local_rank: int) -> RankSlot:
        """Spawn the rank process and tell it who it is."""
        boot, context = tray.boot, tray.context(local_rank)
        who, fleet = f"rank {context.rank}", boot.fleet
        environment = clean_environment(
            os.environ, num_threads=fleet.engine.num_threads or 1, interface=fleet.cluster.interface
        )
        program = Program(who, boot.programs.rank, environment, log_path(boot.folder, who))
        ours, theirs = socket.socketpair()
        with theirs:
            child = Child.spawn(program, stdin=theirs.fileno())
        stream = FrameStream(*await asyncio.open_connection(sock=ours))
        document = RankBoot(
            context=context, fleet=boot.fleet, num_experts=boot.num_experts, secret_path=str(boot.secret_path)
        )
        stream.send(msgspec.msgpack.encode(document))
        return cls(child, stream, context.rank)

    def tell(self, message: TrayToRank) -> None:
        """Queue a message to the rank."""
        self._stream.send(encode(message))

    async def hear(self) -> RankToTray | None:
        """The rank's next message; None when it has closed its end.

        Raises:
            FrameError or msgspec.DecodeError: what it sent is no message.
        """
        payload = await self._stream.receive()
        return None if payload is None else decode_from_rank(payload)

    def note(self, pulse: Pulse) -> None:
        """Keep the newest status block."""
        self._pulse, self._pulse_s = pulse, time.monotonic()

    def aged_pulse(self) -> Pulse | None:
        """The newest status block with its age, once there is one."""
        if self._pulse is None:
            return None
        return msgspec.structs.replace(self._pulse, age_s=time.monotonic() - self._pulse_s)

    async def close(self) -> None:
        """Close the socket to the rank."""
        await self._stream.close()
