"""`pegahpc down`: ask a fleet to drain, wait, and prove that nothing of it is left."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import msgspec

from pegahpc.config import ConfigError
from pegahpc.launch import claim
from pegahpc.launch.fleets import kill_survivors, look
from pegahpc.launch.record import FleetRecord, read_record

POLL_S = 0.05
NOW_BOUND_S = 15.0
EXIT_GRACE_S = 3.0  # for a launcher that has closed the record and only has to exit
DRAIN_BOUND_S = 3600.0  # the fleet bounds its own drain (fleet.drain_timeout_s); this is for one that is broken


class Proof(msgspec.Struct, kw_only=True):
    """What `down` found at the end."""

    name: str
    state: str
    reason: str
    seconds: float
    num_processes: int  # that the fleet had, all gone unless named below
    num_ports: int
    left: list[str]  # processes and ports that are still there, and a record that nobody can close


def take_down(folder: Path, record: FleetRecord, *, now: bool) -> Proof:
    """End a fleet and look at every process and port that its record names.

    Raises:
        ConfigError: the fleet is on another machine.
    """
    if record.is_live and not record.is_here():
        raise ConfigError(f"fleet.name: fleet {record.name!r} runs on {record.host}; run pegahpc down there")
    began_s = time.monotonic()
    last = record
    if record.is_live or record.survivors():
        record.launcher.signal(signal.SIGQUIT if now else signal.SIGTERM)
        last = _wait(folder, record, NOW_BOUND_S if now else DRAIN_BOUND_S)
    left = kill_survivors(last, grace_s=EXIT_GRACE_S) + [
        f"{who} port {address}" for who, address in last.ports() if _listens(address)
    ]
    if (found := _state_on_disk(folder)) not in ("ended", "failed"):
        left.append(f"{folder / 'record.json'}, which is {found} and cannot be closed (is fleet.home full?)")
    return Proof(
        name=last.name,
        state=last.state,
        reason=last.reason,
        seconds=round(time.monotonic() - began_s, 2),
        num_processes=len(last.processes()),
        num_ports=len(last.ports()),
        left=left,
    )


def _wait(folder: Path, record: FleetRecord, bound_s: float) -> FleetRecord:
    """Until the launcher has closed the record and given the name back, or is gone, or the bound is over."""
    deadline_s = time.monotonic() + bound_s
    while time.monotonic() < deadline_s:
        newest = look(folder) or record
        if newest.state == "unreadable":  # a fleet that serves writes it anew
            newest = record
        if newest.launcher != record.launcher or not record.launcher.is_alive():
            return newest if newest.launcher == record.launcher else record
        if not newest.is_live and claim.holder_of(folder) is None:
            return newest
        time.sleep(POLL_S)
    return look(folder) or record


def _state_on_disk(folder: Path) -> str:
    """What everybody else will read."""
    try:
        record = read_record(folder)
    except (ConfigError, OSError):
        return "unreadable"
    return record.state if record is not None else "ended"


def _listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
