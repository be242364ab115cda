"""A client of a fleet's own endpoint. It ignores proxy variables, which have intercepted local calls before."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pegahpc.config import ConfigError
from pegahpc.launch.record import FleetRecord
from pegahpc.wire.keys import FleetSecret

TIMEOUT_S = 120.0


class EndpointError(RuntimeError):
    """The endpoint answered with an error or not at all."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """Calls to one fleet.

    Args:
        url: ends in /v1.
        api_key: None: calls go without one.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port, self._base = parts.hostname, parts.port, parts.path.removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @classmethod
    def of(cls, folder: Path, record: FleetRecord) -> Endpoint:
        """The endpoint of a fleet that serves.

        Raises:
            ConfigError: it does not serve (yet), or its secret cannot be read.
        """
        return cls(*address_of(folder, record))

    def get(self, path: str) -> Any:
        """GET a JSON document.

        Raises:
            EndpointError: anything but 200.
        """
        return self._whole("GET", path, None)

    def chat(self, body: dict[str, Any]) -> Any:
        """POST one chat completion, whole; EndpointError as above."""
        return self._whole("POST", "/v1/chat/completions", body)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST one chat completion and yield its events as they come.

        Raises:
            EndpointError: refused, failed on the way, or ended without its end mark.
        """
        with self._open("POST", "/v1/chat/completions", body | {"stream": True}) as response:
            while line := response.readline():
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        raise EndpointError(event["error"]["message"])
                    yield event
        raise EndpointError("the stream broke off")

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        with self._open(method, path, body) as response:
            return msgspec.json.decode(response.read())

    @contextmanager
    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """The answer of one call on a connection of its own."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        payload = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, self._base + path, payload, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise EndpointError(_said(response.read()), response.status)
            yield response
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EndpointError(f"{self._host}:{self._port}: {error}") from None
        finally:
            connection.close()


def address_of(folder: Path, record: FleetRecord) -> tuple[str, str]:
    """URL and API key of a fleet that serves.

    Raises:
        ConfigError: it does not serve (yet), or its secret cannot be read.
    """
    url = record.gateway.url if record.gateway is not None else ""
    if record.state not in ("ready", "draining") or not url:
        why = f": {record.reason}" if record.reason else ""
        raise ConfigError(f"fleet.name: fleet {record.name!r} does not serve, it is {record.state}{why}")
    try:
        return url, FleetSecret.load(folder / "secret").api_key
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"fleet.home: the secret {folder / 'secret'} cannot be read: {error}") from None


def _said(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
