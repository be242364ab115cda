"""A tray's way to the head: find the address in the fleet record, connect, say hello, be admitted."""

from __future__ import annotations

import asyncio
import logging
import time

from pegahpc.config import ConfigError
from pegahpc.launch.boot import FleetBoot
from pegahpc.launch.frames import FrameError, FrameStream, SignedStream
from pegahpc.launch.messages import HeadToTray, TrayToHead, decode_from_head, encode
from pegahpc.launch.record import read_record
from pegahpc.wire.keys import FleetSecret

log = logging.getLogger(__name__)

RETRY_S = 0.1
NONCE_TIMEOUT_S = 5.0


class HeadLink:
    """The authenticated connection to the head."""

    def __init__(self, stream: SignedStream) -> None:
        self._stream = stream

    @classmethod
    async def connect(cls, boot: FleetBoot) -> HeadLink:
        """Find and reach the head, trying again until `fleet.rendezvous_timeout_s` is over.

        Raises:
            TimeoutError: no head was there in time; says where it was looked for.
        """
        bound_s = boot.fleet.fleet.rendezvous_timeout_s
        deadline_s, address, trouble = time.monotonic() + bound_s, "", "it has not published its address"
        while time.monotonic() < deadline_s:
            address = address or _published(boot)
            if address:
                try:
                    return cls(await _open(address, boot))
                except (OSError, FrameError) as error:
                    trouble = f"{address}: {error}"
            await asyncio.sleep(RETRY_S)
        raise TimeoutError(f"rendezvous: the head was not reached within {bound_s:g} s ({trouble})")

    def send(self, message: TrayToHead) -> None:
        """Queue a message to the head."""
        self._stream.send(encode(message))

    async def hear(self) -> HeadToTray | None:
        """The head's next message; None when it is gone.

        Raises:
            FrameError: it is not signed by this fleet.
        """
        payload = await self._stream.receive()
        return None if payload is None else decode_from_head(payload)

    async def close(self) -> None:
        """Close the connection after what is queued has left."""
        await self._stream.close()


def _published(boot: FleetBoot) -> str:
    """host:port of this run's head, once it stands in a record that can be read."""
    try:
        record = read_record(boot.folder)
    except (ConfigError, OSError) as error:
        log.warning("rendezvous: %s", error)
        return ""
    return record.rendezvous if record is not None and record.run_id == boot.run_id else ""


async def _open(address: str, boot: FleetBoot) -> SignedStream:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), NONCE_TIMEOUT_S)
    nonce = await asyncio.wait_for(FrameStream(reader, writer).receive(), NONCE_TIMEOUT_S)
    if nonce is None:
        raise FrameError("the head closed the connection")
    return SignedStream(reader, writer, secret=FleetSecret.load(boot.secret_path), nonce=nonce, is_head=False)
