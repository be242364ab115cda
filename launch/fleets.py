"""The registry: which fleets a home has, which of them truly live, and what the dead left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pegahpc.config import ConfigError, check_fleet_name
from pegahpc.launch import claim
from pegahpc.launch.identity import ProcessId, boot_id
from pegahpc.launch.journal import add_event
from pegahpc.launch.record import FleetRecord, drop_temp_files, read_record, write_record

DEFAULT_NAME = "pegahpc"
KILL_BOUND_S = 5.0
KILLED = "was killed, or the machine restarted,"


def find_home(home: str | None, environment: Mapping[str, str]) -> Path:
    """The home that conf/config.yaml would choose: given, else $PEGAHPC_HOME, else ~/.pegahpc."""
    return Path(os.path.expanduser(home or environment.get("PEGAHPC_HOME") or "~/.pegahpc")).absolute()


def all_fleets(home: Path) -> list[FleetRecord]:
    """The records of all fleets of a home, by name, with the dead found out."""
    folders = sorted(path.parent for path in home.glob("fleets/*/record.json"))
    return [record for folder in folders if (record := look(folder)) is not None]


def one_fleet(home: Path, name: str | None) -> FleetRecord:
    """The named fleet; without a name the only one that lives, else the only one there is, else `pegahpc`.

    Raises:
        ConfigError: there is no such fleet, several could be meant, or no fleet can have this name.
    """
    if name is None:
        known = all_fleets(home)
        live = [record.name for record in known if record.is_live]
        if not live and len(known) == 1:
            return known[0]
        if len(live) > 1:
            raise ConfigError(f"fleet.name: {len(live)} fleets live in {home}: say --name {' or --name '.join(live)}")
        name = live[0] if live else DEFAULT_NAME
    check_fleet_name(name)
    record = look(home / "fleets" / name)
    if record is None:
        raise ConfigError(f"fleet.name: no fleet {name!r} in {home}; start one with: pegahpc up --name {name}")
    return record


def look(folder: Path, *, death: Callable[[], str] = lambda: KILLED) -> FleetRecord | None:
    """A fleet's record. One that says it lives, though its processes are gone, is corrected first.

    A file that cannot be read is a record in the state "unreadable", so that the other fleets of a home can be seen.

    Args:
        death: asked how the launcher ended, if the record does not say so.
    """
    try:
        record = read_record(folder)
    except (ConfigError, OSError) as error:
        return _unreadable(folder, str(error))
    if record is None or not record.is_live or not record.is_here() or claim.holder_of(folder) is not None:
        return record
    own = ProcessId.own()
    try:
        claim.take(folder, own)  # nobody else may correct it or start anew meanwhile
    except ConfigError:
        return record
    except OSError as error:
        return _presume_dead(record, error)
    try:
        return _bury(folder, death())
    except (ConfigError, OSError) as error:
        return _unreadable(folder, str(error))
    finally:
        claim.release(folder, own)


def kill_survivors(record: FleetRecord, *, grace_s: float = 0.0, bound_s: float = KILL_BOUND_S) -> list[str]:
    """Kill what still runs of a fleet that has ended; names of those that would not go.

    Args:
        grace_s: for processes that are on their way out.
        bound_s: for the kernel to end the others.
    """
    _wait_for_exits(record, grace_s)
    for _, process in record.survivors():
        process.signal(signal.SIGKILL)
    _wait_for_exits(record, bound_s)
    return [f"{who} (pid {process.pid})" for who, process in record.survivors()]


def _wait_for_exits(record: FleetRecord, bound_s: float) -> None:
    deadline_s = time.monotonic() + bound_s
    while record.survivors() and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _unreadable(folder: Path, why: str) -> FleetRecord:
    """What is known without the record: who holds the name. While that one serves, it soon writes the record anew."""
    holder = claim.holder_of(folder)
    return FleetRecord(
        name=folder.name,
        run_id="",
        state="unreadable",
        reason=why,
        host=holder.host if holder else socket.gethostname(),
        boot_id=holder.boot_id if holder else boot_id(),
        launcher=holder.process if holder else ProcessId(0, 0),
        started_at=time.time(),
    )


def _presume_dead(record: FleetRecord, error: OSError) -> FleetRecord:
    """The ending of a fleet whose record cannot be corrected; only the caller sees it."""
    record.state = "failed"
    why = error.strerror or error
    record.reason = f"launcher (pid {record.launcher.pid}) is gone, its record in fleet.home cannot be corrected: {why}"
    record.ended_at = time.time()
    return record


def _bury(folder: Path, death: str) -> FleetRecord | None:
    record = read_record(folder)
    if record is None or not record.is_live:
        return record
    was = record.state
    left = kill_survivors(record)
    drop_temp_files(folder)
    record.state = "failed"
    record.reason = f"launcher (pid {record.launcher.pid}) {death} while the fleet was {was}"
    if left:
        record.reason += f"; still running: {', '.join(left)}"
    record.ended_at = time.time()
    try:
        write_record(folder, record)
    except OSError as error:
        return _presume_dead(record, error)
    add_event(folder, "failed", reason=record.reason)
    return record
