"""From a config to a folder in which a fleet can start: resolved, claimed, with a fresh secret and record."""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pegahpc.config import ConfigError, FleetConfig
from pegahpc.launch import claim
from pegahpc.launch.boot import FleetBoot, Programs
from pegahpc.launch.fleets import kill_survivors, look
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.journal import add_event
from pegahpc.launch.record import drop_temp_files, new_record, prepare_folder, read_record, write_record
from pegahpc.plan import Plan, source_hash
from pegahpc.wire.keys import FleetSecret

EXIT_GRACE_S = 2.0  # for a launcher that has given the name back and only has to exit
CLAIM_PATIENCE_S = 5.0  # for a fleet that has ended but whose launcher still tidies up


def prepare(plan: Plan, launcher: ProcessId, programs: Programs | None = None) -> FleetBoot:
    """Claim the fleet's name for `launcher` and lay everything out.

    Raises:
        ConfigError: the home cannot be written, the name is taken, or the gateway's port is.
    """
    fleet, folder = plan.fleet, plan.fleet.folder
    _check_pulse(fleet)
    _check_interface(fleet.cluster.interface)
    with _home_is_to_blame(folder.parent.parent):
        if claim.holder_of(folder) is None:  # else the name is what is refused
            _check_port(fleet.gateway.host or "127.0.0.1", fleet.gateway.port)  # before there is anything to undo
        prepare_folder(folder)
        _claim(folder, launcher)
        return _lay_out(plan, launcher, programs or Programs())


@contextmanager
def _home_is_to_blame(home: Path) -> Iterator[None]:
    """A full disk, a quota, or rights: what the user sees is which folder it is."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ConfigError(f"fleet.home: {home} cannot be written ({error.strerror or error}{where})") from None


def _lay_out(plan: Plan, launcher: ProcessId, programs: Programs) -> FleetBoot:
    """Secret and record, in a folder whose name is held."""
    fleet, folder = plan.fleet, plan.fleet.folder
    try:
        _check_port(fleet.gateway.host or "127.0.0.1", fleet.gateway.port)
        _clear(folder)
        boot = FleetBoot(
            fleet=fleet,
            run_id=secrets.token_hex(8),
            fingerprint=plan.fingerprint,
            num_experts=plan.num_experts,
            programs=programs,
        )
        FleetSecret.create().save(boot.secret_path)
        record = new_record(name=fleet.fleet.name, run_id=boot.run_id, model=fleet.model.name, launcher=launcher)
        record.fingerprint, record.source, record.config = plan.fingerprint, source_hash(), asdict(fleet)
        write_record(folder, record)
        add_event(folder, "starting", run_id=boot.run_id, world_size=fleet.topology.world_size)
        return boot
    except BaseException:
        claim.release(folder, launcher)
        raise


def _check_pulse(fleet: FleetConfig) -> None:
    """A fleet that idles longer than it may stand still would be ended for it."""
    idle_s = (fleet.engine.idle_wait_ms or 0.0) / 1000
    if idle_s > fleet.gateway.stall_s / 4:
        raise ConfigError(
            f"engine.idle_wait_ms: {fleet.engine.idle_wait_ms:g} is above a quarter of gateway.stall_s"
            f" ({fleet.gateway.stall_s:g} s): an idle fleet would count as stuck"
        )


def _check_interface(interface: str) -> None:
    known = sorted(name for _, name in socket.if_nameindex())
    if interface not in known:
        raise ConfigError(f"cluster.interface: {interface!r} is none of this machine's {', '.join(known)}")


def _claim(folder: Path, launcher: ProcessId) -> None:
    deadline_s = time.monotonic() + CLAIM_PATIENCE_S
    while True:
        try:
            claim.take(folder, launcher)
            return
        except ConfigError:
            record = look(folder)
            if record is None or record.is_live or time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)


def _clear(folder: Path) -> None:
    """End what an earlier fleet left running, and put its logs aside."""
    record = read_record(folder)
    if record is not None and (left := kill_survivors(record, grace_s=EXIT_GRACE_S)):
        raise ConfigError(f"fleet.name: of the fleet before this one still runs: {', '.join(left)}")
    drop_temp_files(folder)
    claim.drop_temp_files(folder)
    logs, previous = folder / "logs", folder / "logs.previous"
    if logs.exists():
        shutil.rmtree(previous, ignore_errors=True)
        logs.rename(previous)
    logs.mkdir(mode=0o700)


def _check_port(host: str, port: int) -> None:
    """Refuse now what the gateway would find out only after the load; its own bind is what counts."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"gateway.port: {host}:{port} cannot be bound ({error.strerror}); choose another, or 0 for any free one"
            ) from None
