"""Processes that a test starts end with it, however it ends."""

import ctypes
import signal

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def dies_with_its_parent() -> None:
    """For `preexec_fn`: the kernel kills the new process when the one that started it is gone."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
