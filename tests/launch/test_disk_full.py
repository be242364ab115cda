"""A home on a small file system: what cannot be written is said in one line, in time, and with an exit status."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegahpc.launch.children import python_module

MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'


def in_small_home(size: str, home: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run shell lines in which `pegahpc` is the command line and $HOME_DIR a fresh file system of `size`."""
    shell = f'pegahpc() {{ {" ".join(python_module("pegahpc.launch.cli"))} "$@"; }}\n{script}'
    return subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            MOUNT,
            "sh",
            size,
            str(home),
            "sh",
            "-c",
            shell,
        ],
        env=os.environ | {"PEGAHPC_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    try:
        can_mount = in_small_home("64k", tmp_path, "true").returncode == 0
    except FileNotFoundError:
        can_mount = False
    if not can_mount or sys.platform != "linux":
        pytest.skip("this machine lets nobody mount a file system in a namespace of their own")
    yield tmp_path


@pytest.mark.parametrize("detach", ["", "--detach"])
@pytest.mark.parametrize("size", ["4k", "8k", "24k"])
def test_a_fleet_that_does_not_fit_its_home_is_refused_or_fails_in_time(home: Path, size: str, detach: str) -> None:
    began_s = time.monotonic()
    ran = in_small_home(size, home, f"pegahpc up {detach} topology=ep1 gateway.port=0")
    assert time.monotonic() - began_s < 40
    assert ran.returncode in (1, 2) and "Traceback" not in ran.stderr, ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("pegahpc: f"), ran.stderr


@pytest.mark.slow
def test_a_fleet_whose_home_fills_up_is_taken_down_and_its_record_is_not_believed(home: Path) -> None:
    ran = in_small_home(
        "1m",
        home,
        """
        pegahpc up --detach topology=ep1 gateway.port=0 >&2 || exit 9
        cat /dev/zero > "$PEGAHPC_HOME/filler" 2> /dev/null
        pegahpc down; echo "down $?"
        pegahpc ls; echo "ls $?"
        ls -A "$PEGAHPC_HOME/fleets/pegahpc"
        rm "$PEGAHPC_HOME/filler"
        pegahpc status > /dev/null; echo "status $?"
        """,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    assert "down 1" in ran.stdout and "record.json, which is ready and cannot be closed" in ran.stdout
    assert "ls 0" in ran.stdout and "status 1" in ran.stdout and ".tmp" not in ran.stdout
