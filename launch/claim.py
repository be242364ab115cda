"""Who may run a fleet of one name: claim files made by link(2), which is atomic on shared file systems too. No flock.

Claims are numbered. The highest number holds the name, until it is given back or its process ends. A claim whose
process is gone is taken over by linking the next number: of two who try, one succeeds. Numbers only grow, so a slow
second cannot take over a claim that it judged long ago.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from pegahpc.atomic import write_atomically
from pegahpc.config import ConfigError
from pegahpc.launch.identity import ProcessId, boot_id

log = logging.getLogger(__name__)

PREFIX = "claim."
TEMP_IS_OLD_S = 60.0  # nobody takes so long between writing a claim and linking it


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a fleet's name."""

    host: str
    boot_id: str
    process: ProcessId

    @classmethod
    def by(cls, process: ProcessId) -> Claim:
        """A claim of a process on this machine."""
        return cls(host=socket.gethostname(), boot_id=boot_id(), process=process)

    def is_held(self) -> bool:
        """Whether the holder lives. Of a process on another machine nothing can be known: it counts as alive."""
        if self.process.pid == 0:  # given back
            return False
        if self.host != socket.gethostname():
            return True
        return self.boot_id == boot_id() and self.process.is_alive()


def take(folder: Path, process: ProcessId) -> None:
    """Claim the fleet's folder for `process` until it ends.

    Raises:
        ConfigError: another living process holds it, which the message names; or the claim there is damaged.
        OSError: the folder cannot be written; nothing is left behind.
    """
    mine = Claim.by(process)
    temp = folder / f".claim.{secrets.token_hex(8)}.tmp"
    try:
        _write_through(temp, msgspec.json.encode(mine))
        while True:
            number, holder = _highest(folder)
            if holder is None and number:
                raise ConfigError(_damaged(folder, number))
            if holder is not None and holder.is_held():
                raise ConfigError(_refusal(folder, holder))
            if _link(temp, folder / f"{PREFIX}{number + 1}") and _highest(folder)[0] == number + 1:
                _drop_older(folder, number + 1)
                return
    finally:
        temp.unlink(missing_ok=True)


def release(folder: Path, process: ProcessId) -> None:
    """Give the name back before the process ends; nothing happens when another holds it.

    Where that cannot be written, the name is free when the process has ended.
    """
    number, holder = _highest(folder)
    if holder is not None and holder == Claim.by(process):
        nobody = msgspec.structs.replace(holder, process=ProcessId(0, 0))
        try:
            write_atomically(folder / f"{PREFIX}{number}", msgspec.json.encode(nobody))
        except OSError as error:
            log.info("fleet.home: the name stays taken until process %d ends: %s", process.pid, error)


def holder_of(folder: Path) -> Claim | None:
    """The living holder of a fleet's name, if there is one."""
    holder = _highest(folder)[1]
    return holder if holder is not None and holder.is_held() else None


def drop_temp_files(folder: Path) -> None:
    """Remove what a process that was killed while it took the name, or gave it back, has left."""
    for temp in folder.glob(".claim.*.tmp"):
        try:
            if time.time() - temp.stat().st_mtime > TEMP_IS_OLD_S:
                temp.unlink()
        except FileNotFoundError:
            continue


def _write_through(path: Path, data: bytes) -> None:
    """Link nothing that the disk may not have: a claim whose bytes were lost would read as damaged."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _numbers(folder: Path) -> list[int]:
    names = (entry.name.removeprefix(PREFIX) for entry in folder.glob(f"{PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _highest(folder: Path) -> tuple[int, Claim | None]:
    """Number and content of the claim that counts; (0, None) when there is none, (number, None) when it is damaged."""
    while numbers := _numbers(folder):
        try:
            data = (folder / f"{PREFIX}{numbers[-1]}").read_bytes()
        except FileNotFoundError:  # taken over between the two lines: look again
            continue
        try:
            return numbers[-1], msgspec.json.decode(data, type=Claim)
        except msgspec.DecodeError:
            return numbers[-1], None
    return 0, None


def _link(temp: Path, claim: Path) -> bool:
    try:
        os.link(temp, claim)
    except FileExistsError:
        return False
    return True


def _drop_older(folder: Path, number: int) -> None:
    for older in _numbers(folder):
        if older < number:
            (folder / f"{PREFIX}{older}").unlink(missing_ok=True)


def _damaged(folder: Path, number: int) -> str:
    return (
        f"fleet.home: {folder / f'{PREFIX}{number}'} is damaged, so nobody knows whether a fleet {folder.name!r} lives;"
        " if none does, remove that file"
    )


def _refusal(folder: Path, holder: Claim) -> str:
    name = folder.name
    if holder.host != socket.gethostname():
        return (
            f"fleet.name: a fleet {name!r} was started on {holder.host} (pid {holder.process.pid}); run pegahpc down"
            f" --name {name} there, or choose another name; if {holder.host} is gone for good, remove {folder}"
        )
    return (
        f"fleet.name: a fleet {name!r} is alive on {holder.host} (pid {holder.process.pid});"
        f" choose another name, or end it with: pegahpc down --name {name}"
    )
