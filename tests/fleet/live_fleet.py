"""A fleet of the shipped model as clients and the kernel see it: who is who, what it opened, what it left."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec
import psutil

from pegahpc.config import compose_fleet
from pegahpc.launch import claim
from pegahpc.launch.boot import Programs
from pegahpc.launch.children import python_module
from pegahpc.launch.endpoint import Endpoint, address_of
from pegahpc.launch.identity import ProcessId
from pegahpc.launch.prepare import prepare
from pegahpc.launch.record import FleetRecord, read_record
from pegahpc.plan import resolve
from tests.launch.running_fleet import BESIDE_RECORD_AND_LOGS, RunningFleet

READY_WITHIN_S = 60.0
QUESTION, ANSWER = "What is 3 plus 4?", "3 plus 4 is 7."


class LiveFleet(RunningFleet):
    """A detached fleet whose temporary folder is its own, so that every process of it can be found by that."""

    def __init__(self, home: Path, *overrides: str, programs: Programs | None = None) -> None:
        self.temp = home / "temp"
        self.temp.mkdir(exist_ok=True)
        self.before = _kernel_names()
        environment = os.environ | {"TMPDIR": str(self.temp)}
        launcher = subprocess.Popen(python_module("pegahpc.launch.local"), stdin=subprocess.PIPE, env=environment)
        assert launcher.stdin is not None
        plan = resolve(compose_fleet([f"fleet.home={home}", "gateway.port=0", *overrides]))
        with launcher.stdin as stdin:
            boot = prepare(plan, ProcessId.of(launcher.pid), programs)
            stdin.write(msgspec.msgpack.encode(boot))
        super().__init__(boot.folder, launcher)

    def record(self) -> FleetRecord:
        """The record as the fleet itself left it: nobody tidies up behind it here."""
        record = read_record(self.folder)
        assert record is not None
        return record

    def when_ready(self) -> FleetRecord:
        """Wait until it serves."""
        record = self.wait_for("ready", "failed", within_s=READY_WITHIN_S)
        assert record.state == "ready", record.reason
        return record

    def address(self) -> tuple[str, str]:
        """URL that ends in /v1, and key."""
        return address_of(self.folder, self.record())

    def answers(self) -> str:
        """What it says to a question with a known answer."""
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": "tiny-moe", "messages": messages, "temperature": 0, "max_tokens": 40}
        return str(Endpoint(*self.address()).chat(body)["choices"][0]["message"]["content"])

    def who(self) -> dict[str, int]:
        """Pids by the names that people use; of each process the log that it writes to tells.

        What a process has started (the gateway its renderers of chats) writes to the same log.
        """
        logs = {pid: Path(_link(pid, "fd/2")) for pid in self.pids()}
        found = {"launcher": self.launcher.pid}
        for pid, log in logs.items():
            if log.parent == self.folder / "logs" and logs.get(_parent(pid)) != log:
                found[log.stem.replace("-", " ")] = pid
        return found

    def pids(self) -> list[int]:
        """Every living process with this fleet's temporary folder."""
        mark = f"TMPDIR={self.temp}".encode()
        return [pid for pid in psutil.pids() if mark in _environment(pid).split(b"\0")]

    def _living(self) -> list[str]:
        self.launcher.poll()  # else it stays as a zombie of this process
        return [_command(pid) for pid in self.pids()]

    def assert_gone(self, ports: list[tuple[str, str]], by_s: float) -> None:
        """No process by that monotonic time; with them went ports, memory, sockets, temporary files and the name."""
        while living := self._living():
            assert time.monotonic() < by_s, f"left: {', '.join(living)}; record: {self.record().reason!r}"
            time.sleep(0.02)
        new = {name for name in _kernel_names() - self.before if not _is_anothers(name)}  # slow among many processes
        assert new & _kernel_names() == set()
        self.assert_ports_closed(ports)
        assert list(self.temp.iterdir()) == []
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(claim.PREFIX)}
        assert names <= BESIDE_RECORD_AND_LOGS
        assert claim.holder_of(self.folder) is None


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return 0


def _command(pid: int) -> str:
    """`71 (pegahpc.launch.rank, S)`."""
    try:
        process = psutil.Process(pid)
        return f"{pid} ({' '.join(process.cmdline()[2:])}, {process.status()})"
    except psutil.NoSuchProcess:
        return f"{pid}"


def _kernel_names() -> set[str]:
    """What has a name without being a file of ours: shared memory, and abstract sockets of fabrics."""
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@pegahpc" in line]
    return {*sockets, *os.listdir("/dev/shm")}


def _is_anothers(name: str) -> bool:
    """Whether a living process holds it: when a fleet has no process any more, that is no process of it."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    inodes = [f"socket:[{line.split()[6]}]" for line in lines if line.endswith(f" {name}")]
    return any(files_of(pid) & {*inodes, f"/dev/shm/{name}"} for pid in psutil.pids())


def files_of(pid: int) -> set[str]:
    """What a process has open; it may close some of it, or end, while we look."""
    try:
        return {_link(pid, f"fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return set()


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # a zombie's is empty
    except OSError:
        return b""


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""
