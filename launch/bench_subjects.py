"""Whom `pegahpc bench run` means: an engine of some overrides, an endpoint, or a fleet of the registry."""

from __future__ import annotations

import os
from pathlib import Path

from pegahpc.bench.ready import InProcess, OverHttp, OverWire
from pegahpc.bench.served import KnownFleet
from pegahpc.config import ConfigError, compose_fleet
from pegahpc.launch.endpoint import address_of
from pegahpc.launch.fleets import find_home, one_fleet
from pegahpc.plan import resolve
from pegahpc.wire.keys import FleetSecret


def engine_of(overrides: list[str]) -> InProcess:
    """The engine of a configuration; one rank unless the overrides say otherwise."""
    has_topology = any(override.startswith(("topology=", "topology.")) for override in overrides)
    return InProcess(resolve(compose_fleet(overrides if has_topology else ["topology=ep1", *overrides])))


def endpoint_at(url: str, *, model: str | None, key: str | None) -> OverHttp:
    """Somebody's endpoint.

    Raises:
        ConfigError: the URL is none, or has a password that would stand in the result.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} must begin with http:// or https://")
    if "@" in url.split("/")[2]:
        raise ConfigError("--url: a password has no place in a result; use --key-env or --key-file")
    return OverHttp(url=url, api_key=key, model=model)


def read_key(variable: str, file: Path | None) -> str | None:
    """An API key from a file, else from the environment; None: there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return file.read_text().strip() if file else os.environ.get(variable)
    except OSError as error:
        raise ConfigError(f"--key-file: {file} cannot be read: {error.strerror}") from None


def running_fleet(home: str | None, name: str | None, *, model: str | None, is_wire: bool) -> OverHttp | OverWire:
    """A fleet that serves, over HTTP or over its ranks' wire.

    Raises:
        ConfigError: there is no such fleet, it does not serve, or its checkpoint is not here.
    """
    fleet = _known(home, name)
    if not is_wire:
        return OverHttp(url=fleet.url, api_key=fleet.secret.api_key, model=model, fleet=fleet)
    if not fleet.config or not fleet.model_folder.is_dir():
        raise ConfigError("--wire: needs the fleet's checkpoint on this file system; measure it over HTTP")
    return OverWire(fleet)


def _known(home: str | None, name: str | None) -> KnownFleet:
    found = find_home(home, os.environ)
    record = one_fleet(found, name)
    folder = found / "fleets" / record.name
    address, _ = address_of(folder, record)
    return KnownFleet(
        name=record.name,
        url=address,
        model=record.model,
        host=record.host,
        source=record.source,
        fingerprint=record.fingerprint,
        config=record.config,
        devices=[entry.device for entry in record.ranks],
        endpoints=[entry.endpoint for entry in record.ranks],
        secret=FleetSecret.load(folder / "secret"),
    )
