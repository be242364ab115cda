"""Which process is meant: a pid with its start time, so that a recycled pid is never trusted."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

STATE, START_TICK = 0, 19  # places in /proc/PID/stat after the name: fields 3 and 22 of proc(5)


class ProcessId(msgspec.Struct, frozen=True):
    """One process of this boot: the pid and the clock tick at which it started."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Identify a process that is there.

        Raises:
            ProcessLookupError: there is none.
        """
        fields = _stat(pid)
        if fields is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, int(fields[START_TICK]))

    @classmethod
    def own(cls) -> ProcessId:
        """Identify the caller."""
        return cls.of(os.getpid())

    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        fields = _stat(self.pid)
        return fields is not None and fields[STATE] not in "ZX" and int(fields[START_TICK]) == self.started

    def is_frozen(self) -> bool:
        """Whether someone has stopped it (SIGSTOP, a debugger)."""
        fields = _stat(self.pid)
        return fields is not None and fields[STATE] in "Tt" and int(fields[START_TICK]) == self.started

    def signal(self, signum: int) -> bool:
        """Send a signal unless the process is gone; True when it was sent."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def boot_id() -> str:
    """What changes when the machine restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields 3 and later of /proc/PID/stat (the name before them may hold blanks), or None for no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()
