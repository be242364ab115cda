"""A process that does not outlive its parent, however that ends: the kernel sends it a signal. Linux only."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a new child may not, before its exec


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """From now on. A parent that is gone by then sends nothing: where that can be, look at `os.getppid` afterwards."""
    LIBC.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
