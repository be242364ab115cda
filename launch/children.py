"""Child processes that get an explicit environment, die with their parent, and whose end is put into words."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pegahpc.launch.identity import ProcessId
from pegahpc.parent_death import LIBC, die_with_parent

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02
MAYBE_MEMORY = " (out of memory?)"  # the kernel kills so, and only its own log says whether it did
LOG_PREFIX = re.compile(r"^[\d-]+[T ][\d:.,]+ (?:gateway )?[A-Z]+ [\w.]+: ")

# What a child keeps of its parent's environment. Anything else (SLURM_*, PMI*, OMPI*, *_proxy) has hung or misled
# children of launchers before.
KEPT = {
    "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH",
    "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
}  # fmt: skip
KEPT_PREFIXES = ("LC_", "NVIDIA_", "NCCL_", "XDG_")


def clean_environment(environment: Mapping[str, str], *, num_threads: int, interface: str) -> dict[str, str]:
    """The environment of a fleet's process: what is known to be safe, and what must be set before torch is imported."""
    kept = {key: value for key, value in environment.items() if key in KEPT or key.startswith(KEPT_PREFIXES)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))
    return kept | threads | {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }  # fmt: skip


def python_module(module: str) -> list[str]:
    """Command line of one of our own programs, with this interpreter."""
    return [sys.executable, "-P", "-m", module]


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it can be waited for."""
    if LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _die_with(parent: int, signum: int) -> Callable[[], None]:
    """What a new child runs before exec; the parent may have died before the signal was armed."""

    def arm() -> None:
        die_with_parent(signum)
        if os.getppid() != parent:
            os._exit(1)

    return arm


@dataclass(frozen=True)
class Program:
    """What to run, under which name, in which environment, and where its words go."""

    who: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path


class Child:
    """One child process. Spawn from a thread that lives on: the kernel ties the death signal to the thread."""

    def __init__(self, who: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.who = who
        self.process = process
        self.log_path = log_path
        self.id = ProcessId.of(process.pid)

    @classmethod
    def spawn(
        cls,
        program: Program,
        *,
        stdin: int | IO[bytes] = subprocess.PIPE,
        has_output: bool = False,
        is_parent: bool = False,
    ) -> Child:
        """Start a program whose words go to its log.

        Args:
            has_output: standard output is a pipe to the caller instead of the log.
            is_parent: it has children of its own to end: when the caller dies it gets SIGTERM instead of SIGKILL, and
                it has a session of its own, which the terminal's Ctrl-C does not reach.
        """
        with open(program.log_path, "ab") as log_file:
            process = subprocess.Popen(
                program.command,
                stdin=stdin,
                stdout=subprocess.PIPE if has_output else log_file,
                stderr=log_file,
                env=dict(program.environment),
                start_new_session=is_parent,
                preexec_fn=_die_with(os.getpid(), signal.SIGTERM if is_parent else signal.SIGKILL),
            )
        return cls(program.who, process, program.log_path)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; reaps it when it does not."""
        return self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal's number, or None while it runs."""
        return self.process.poll()

    def hand_over(self, document: bytes) -> None:
        """Write the child's whole standard input and close it; a child that is gone shows in `is_alive`."""
        assert self.process.stdin is not None
        try:
            with self.process.stdin as stdin:
                stdin.write(document)
        except BrokenPipeError:
            return

    def signal(self, signum: int) -> None:
        """Send a signal; a child that has ended is left alone."""
        if self.is_alive:
            self.process.send_signal(signum)

    def describe(self) -> str:
        """`rank 2 (pid 71) was killed by SIGTERM`."""
        return f"{self.who} (pid {self.id.pid}) {how_it_ended(self.process.poll())}"


async def has_ended(child: Child, timeout_s: float | None = None) -> bool:
    """Wait for a child's end, reaping it; False when it still runs after `timeout_s` (None: no bound)."""
    try:
        async with asyncio.timeout(timeout_s):
            while child.is_alive:
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    return True


def how_it_ended(exit_code: int | None) -> str:
    """An exit code as people say it."""
    if exit_code is None:
        return "still runs"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}{MAYBE_MEMORY if exit_code == -signal.SIGKILL else ''}"
    return f"exited with code {exit_code}"


def last_line(log_path: Path) -> str:
    """The last line that a process said, without the logger's prefix, for a reason in one line."""
    with open(log_path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return LOG_PREFIX.sub("", next((line.strip() for line in reversed(lines) if line.strip()), ""))
