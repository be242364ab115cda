"""The document that starts the gateway, and the line with which it answers."""

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
    """The gateway's one line on standard output, as JSON: its port is bound and serves."""

    host: str
    port: int
