"""The document that starts the gateway, and the lines that it says."""

from __future__ import annotations

import msgspec

from pegahpc.config import FleetConfig


class GatewayBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway serves; msgpack on its standard input.

    Args:
        endpoints: the wire endpoint of rank 0, 1, ...
        host, port: where to listen; port 0 is any free one.
    """

    fleet: FleetConfig
    endpoints: list[str]
    secret_path: str
    host: str
    port: int


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="listening"):
    """The gateway's port is bound and serves; said once."""

    host: str
    port: int


class Beat(msgspec.Struct, frozen=True, tag_field="event", tag="beat"):
    """The gateway's event loop turns; said every `BEAT_S`, from the loop's start to its end."""


Word = Listening | Beat
BEAT_S = 0.25

decode_word = msgspec.json.Decoder(Word).decode


def encode_word(word: Word) -> bytes:
    """One line on the gateway's standard output, as JSON."""
    return msgspec.json.encode(word) + b"\n"
