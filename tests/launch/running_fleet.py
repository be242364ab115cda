"""A fleet of real processes as a test sees it: the record, the kernel's view, and what is left at the end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pegahpc.launch import claim
from pegahpc.launch.boot import Programs
from pegahpc.launch.fleets import look
from pegahpc.launch.record import FleetRecord

HERE = Path(__file__).parent
BESIDE_RECORD_AND_LOGS = {"record.json", "secret", "events.jsonl", "logs", "logs.previous"}


def until(is_so: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for something to become true."""
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        time.sleep(0.02)


class RunningFleet:
    """A fleet under a detached launcher."""

    def __init__(self, folder: Path, launcher: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.launcher = launcher
        self._seen: dict[int, psutil.Process] = {}

    def record(self) -> FleetRecord:
        """The record as everyone sees it."""
        record = look(self.folder)
        assert record is not None
        return record

    def wait_for(self, *states: str, within_s: float = 20.0) -> FleetRecord:
        """Wait until the record says one of these states."""
        until(lambda: self.record().state in states, within_s)
        return self.record()

    def processes(self) -> list[psutil.Process]:
        """Every process that the launcher has had under it, with itself, by what the kernel says."""
        if psutil.pid_exists(self.launcher.pid):
            root = psutil.Process(self.launcher.pid)
            for process in [root, *root.children(recursive=True)]:
                self._seen[process.pid] = process
        return list(self._seen.values())

    def assert_nothing_is_left(self, ports: list[tuple[str, str]], within_s: float = 10.0) -> None:
        """No process, no port, no file beside the record, the logs and a spent claim."""
        until(lambda: not [process for process in self._seen.values() if self._runs(process)], within_s)
        self.assert_ports_closed(ports)
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(claim.PREFIX)}
        assert names <= BESIDE_RECORD_AND_LOGS
        assert claim.holder_of(self.folder) is None

    def assert_ports_closed(self, ports: list[tuple[str, str]]) -> None:
        """Nobody answers where the fleet did."""
        for who, address in ports:
            host, port = address.rsplit(":", 1)
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, f"{who} still listens on {address}"

    def end(self) -> None:
        """Kill what is left."""
        self.launcher.send_signal(signal.SIGQUIT)
        self.launcher.wait(20)

    def _runs(self, process: psutil.Process) -> bool:
        self.launcher.poll()
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def pretend_programs(*rank_acts: str, gateway: str = "") -> Programs:
    """Rank and gateway programs that need no model."""
    run = [sys.executable, "-P"]
    return Programs(
        rank=[*run, str(HERE / "pretend_rank.py"), *rank_acts],
        gateway=[*run, str(HERE / "pretend_gateway.py"), *([gateway] if gateway else [])],
    )
