"""Frames of u32 length (network order, at most 1 MiB) and a payload; on TCP each frame is signed."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

from pegahpc.wire.keys import FleetSecret

MAX_FRAME_BYTES = 1 << 20
NONCE_BYTES = 32
MAC_BYTES = 32
CLOSE_TIMEOUT_S = 1.0
LENGTH = struct.Struct(">I")
COUNT = struct.Struct(">Q")


class FrameError(ValueError):
    """Bytes that no peer of ours sends; the connection that carried them is closed."""


class FrameStream:
    """Frames over an asyncio stream, unsigned: for a socket that only parent and child hold."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> bytes | None:
        """The next payload, or None when the peer has closed between two frames.

        Raises:
            FrameError: the frame is too long or cut off.
        """
        try:
            head = await self._reader.readexactly(LENGTH.size)
            return await self._reader.readexactly(_length(head))
        except asyncio.IncompleteReadError as error:
            if error.partial or error.expected != LENGTH.size:
                raise FrameError("the connection closed within a frame") from None
            return None
        except ConnectionError:
            return None

    def send(self, payload: bytes) -> None:
        """Queue one frame; a peer that is gone is noticed by `receive`."""
        if not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(payload)) + payload)

    async def close(self) -> None:
        """Close the connection after what is queued has left; at once if the peer is gone or does not read."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_TIMEOUT_S)
        except (ConnectionError, TimeoutError):
            self._writer.transport.abort()


class SignedStream(FrameStream):
    """Frames that carry HMAC-SHA256 over the connection's nonce and the payload.

    The nonce is extended by the direction and the frame's count, so that no frame can be sent back or sent twice.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        secret: FleetSecret,
        nonce: bytes,
        is_head: bool,
    ) -> None:
        super().__init__(reader, writer)
        self._secret = secret
        self._out_nonce = nonce + (b"head" if is_head else b"tray")
        self._in_nonce = nonce + (b"tray" if is_head else b"head")
        self._num_out = self._num_in = 0

    async def receive(self) -> bytes | None:
        """The next payload, or None when the peer has closed.

        Raises:
            FrameError: too long, cut off, or not signed by this fleet.
        """
        frame = await super().receive()
        if frame is None:
            return None
        mac, payload = frame[:MAC_BYTES], frame[MAC_BYTES:]
        if not self._secret.is_signed(self._in_nonce + COUNT.pack(self._num_in), payload, mac):
            raise FrameError("a frame without this fleet's signature")
        self._num_in += 1
        return payload

    def send(self, payload: bytes) -> None:
        """Sign and queue one frame."""
        mac = self._secret.sign(self._out_nonce + COUNT.pack(self._num_out), payload)
        self._num_out += 1
        super().send(mac + payload)


class BlockingFrames:
    """A rank's end: frames over a connected socket. `send` may be called by any thread, `receive` by one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def receive(self) -> bytes | None:
        """The next payload, or None when the peer has closed; blocks.

        Raises:
            FrameError: the frame is too long or cut off.
        """
        head = self._exactly(LENGTH.size)
        if not head:
            return None
        return self._exactly(_length(head))

    def send(self, payload: bytes) -> None:
        """Send one frame.

        Raises:
            OSError: the peer is gone.
        """
        with self._lock:
            self._connection.sendall(LENGTH.pack(len(payload)) + payload)

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def _exactly(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._connection.recv(num_bytes - len(parts))
            if not part:
                if parts:
                    raise FrameError("the connection closed within a frame")
                return b""
            parts += part
        return bytes(parts)


def _length(head: bytes) -> int:
    length = int(LENGTH.unpack(head)[0])
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is above {MAX_FRAME_BYTES}")
    return length
