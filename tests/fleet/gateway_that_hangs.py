"""The gateway itself, in which a call on the event loop's thread does not return when a signal says so.

SIGUSR2: in one that lets other threads go on. SIGRTMIN: in one that keeps Python's lock. SIGRTMIN + 1: for 3 s only.
"""

import ctypes
import signal
import sys
import time

from pegahpc.gateway.main import main


def keep_the_lock(*_: object) -> None:
    """As a C call that never returns."""
    while True:
        ctypes.PyDLL(None).pause()


signal.signal(signal.SIGUSR2, lambda *_: time.sleep(1e9))
signal.signal(signal.SIGRTMIN, keep_the_lock)
signal.signal(signal.SIGRTMIN + 1, lambda *_: time.sleep(3))
sys.exit(main())
