"""The fleet record: one JSON file per fleet, replaced atomically, that any node can read."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from pegahpc.atomic import write_atomically
from pegahpc.config import ConfigError
from pegahpc.launch.identity import ProcessId, boot_id
from pegahpc.wire.messages import PhaseTimes

State = Literal["starting", "loading", "ready", "draining", "ended", "failed", "unreadable"]  # the last: no record says
LIVE: tuple[State, ...] = ("starting", "loading", "ready", "draining")
RECORD_VERSION = 1


class TrayEntry(msgspec.Struct, kw_only=True):
    """One tray process."""

    tray: int
    host: str
    process: ProcessId


class RankEntry(msgspec.Struct, kw_only=True):
    """One rank process and what its tray last heard of it."""

    rank: int
    tray: int
    host: str = ""
    process: ProcessId | None = None  # None until its tray has said hello
    endpoint: str = ""
    device: str = ""
    stage: str = "boot"  # boot, rendezvous, load, warmup, ready
    progress: float = 0.0  # of the stage, 0 to 1
    step: int = 0
    phase: str = ""
    waiting_for: str = ""
    num_running: int = 0
    num_waiting: int = 0
    phases: PhaseTimes = PhaseTimes()  # since the engine started
    recent_phases: PhaseTimes = PhaseTimes()  # of the last seconds only
    last_seen_s: float = 0.0  # age of the status block when the record was written
    log: str = ""


class GatewayEntry(msgspec.Struct, kw_only=True):
    """The gateway process; `url` ends in /v1 and is empty until the port is bound."""

    process: ProcessId
    url: str = ""


class FleetRecord(msgspec.Struct, kw_only=True):
    """Everything that `ls`, `status`, `url`, `logs` and `down` know of a fleet."""

    version: int = RECORD_VERSION
    name: str
    run_id: str  # made anew by each `up`
    state: State = "starting"
    reason: str = ""  # why it ended or failed
    model: str = ""
    host: str
    boot_id: str
    fingerprint: str = ""
    source: str = ""  # of the code that it runs (`pegahpc.plan.source_hash`)
    config: dict[str, Any] = {}  # resolved, as `pegahpc plan --json` shows it
    launcher: ProcessId
    trays: list[TrayEntry] = []
    ranks: list[RankEntry] = []
    gateway: GatewayEntry | None = None
    rendezvous: str = ""  # host:port of the head
    started_at: float  # seconds since the epoch, as the three below
    ready_at: float = 0.0
    ended_at: float = 0.0
    updated_at: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the record claims that the fleet runs."""
        return self.state in LIVE

    def processes(self) -> list[tuple[str, ProcessId]]:
        """Every process of the fleet that the record knows, by the name that people use."""
        named = [("launcher", self.launcher)]
        named += [(f"tray {entry.tray}", entry.process) for entry in self.trays]
        named += [(f"rank {entry.rank}", entry.process) for entry in self.ranks if entry.process is not None]
        return named + ([("gateway", self.gateway.process)] if self.gateway is not None else [])

    def ports(self) -> list[tuple[str, str]]:
        """Every port that the fleet listens on, as (who, host:port)."""
        named = [("rendezvous", self.rendezvous)] if self.rendezvous else []
        named += [(f"rank {entry.rank}", entry.endpoint.removeprefix("tcp://")) for entry in self.ranks]
        if self.gateway is not None and self.gateway.url:
            named.append(("gateway", self.gateway.url.removeprefix("http://").removesuffix("/v1")))
        return [(who, address) for who, address in named if address]

    def is_here(self) -> bool:
        """Whether the fleet's head is on this machine, so that its pids can be looked up."""
        return self.host == socket.gethostname()

    def survivors(self) -> list[tuple[str, ProcessId]]:
        """Processes of the record, other than the caller, that still run on this machine."""
        if not self.is_here() or self.boot_id != boot_id():
            return []
        others = [(who, process) for who, process in self.processes() if process.pid != os.getpid()]
        return [(who, process) for who, process in others if process.is_alive()]


def new_record(*, name: str, run_id: str, model: str, launcher: ProcessId) -> FleetRecord:
    """The record of a fleet that is about to start on this machine."""
    return FleetRecord(
        name=name,
        run_id=run_id,
        model=model,
        host=socket.gethostname(),
        boot_id=boot_id(),
        launcher=launcher,
        started_at=time.time(),
    )


def write_record(folder: Path, record: FleetRecord) -> None:
    """Replace the record; the reader sees the old one or the new one."""
    record.updated_at = time.time()
    data = msgspec.json.format(msgspec.json.encode(record), indent=1)
    write_atomically(folder / "record.json", data + b"\n")


def read_record(folder: Path) -> FleetRecord | None:
    """The record as written, or None when the fleet never was.

    Raises:
        ConfigError: the file is not a record of this version.
    """
    path = folder / "record.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=FleetRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(f"fleet.home: {path} is not a fleet record ({error}); move the folder away") from None


def drop_temp_files(folder: Path) -> None:
    """Remove what a process that was killed within an atomic write has left; for the holder of the name.

    Raises:
        OSError: the folder is not writable.
    """
    for name in ("record.json", "secret"):
        for temp in folder.glob(f".{name}.*.tmp"):
            temp.unlink(missing_ok=True)


def prepare_folder(folder: Path) -> None:
    """Make the fleet's folder, mode 0700.

    Raises:
        ConfigError: the home cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        home = folder.parent.parent
        raise ConfigError(f"fleet.home: {home} cannot be written ({error.strerror}: {error.filename})") from None
