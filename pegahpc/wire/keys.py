"""A fleet's secret: made once at `up`, mode 0600, and the only thing that opens the fleet's ports."""

from __future__ import annotations

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

import msgspec
import zmq

from pegahpc.atomic import write_atomically


class FleetSecret(msgspec.Struct, frozen=True, kw_only=True):
    """32 random bytes for the rendezvous, CURVE key pairs (Z85) for the wire, a bearer key for the gateway."""

    shared: bytes
    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    api_key: str

    @classmethod
    def create(cls) -> FleetSecret:
        """Draw everything anew."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            shared=secrets.token_bytes(32),
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
            api_key="pega-" + secrets.token_urlsafe(32),
        )

    def save(self, path: Path) -> None:
        """Write with mode 0600 from the first byte."""
        write_atomically(path, msgspec.msgpack.encode(self), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> FleetSecret:
        """Read what `save` wrote.

        Raises:
            PermissionError: others may read the file; OSError or ValueError: it is missing or damaged.
        """
        mode = os.stat(path).st_mode & 0o777
        if mode & 0o077:
            raise PermissionError(f"{path}: mode {mode:o} lets others read the fleet's secret; chmod 600 it")
        return msgspec.msgpack.decode(path.read_bytes(), type=cls)

    def sign(self, nonce: bytes, payload: bytes) -> bytes:
        """HMAC-SHA256 over nonce and payload, 32 bytes."""
        return hmac.new(self.shared, nonce + payload, sha256).digest()

    def is_signed(self, nonce: bytes, payload: bytes, mac: bytes) -> bool:
        """Whether `mac` was made with this secret; constant time."""
        return hmac.compare_digest(self.sign(nonce, payload), mac)
