"""A gateway that hangs without being stopped: its event loop has no pulse, though its process and its threads live."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from pegahpc.launch.boot import Programs
from tests.fleet.live_fleet import ANSWER, LiveFleet

pytestmark = pytest.mark.slow

BOUND_S = 10.0  # from the last turn of the loop until nothing is left
SCRIPT = Path(__file__).parent / "gateway_that_hangs.py"


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGRTMIN], ids=["in a sleep", "with Python's lock"])
def test_it_is_named_within_the_bound_and_nothing_is_left(tmp_path: Path, signum: int) -> None:
    fleet = LiveFleet(tmp_path, "topology=ep2", programs=Programs(gateway=[sys.executable, "-P", str(SCRIPT)]))
    try:
        record = fleet.when_ready()
        pid = fleet.who()["gateway"]
        os.kill(pid, signal.SIGRTMIN + 1)
        assert fleet.answers() == ANSWER  # after 3 s: a loop may be late
        struck_s = time.monotonic()
        os.kill(pid, signum)
        time.sleep(1)
        assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
        fleet.assert_gone(record.ports(), struck_s + BOUND_S)
        reason = fleet.record().reason
        print(f"{time.monotonic() - struck_s:.1f} s: {reason}")
        assert reason.startswith(f"gateway (pid {pid}) hangs: its event loop has not turned for ")
    finally:
        fleet.end()
