"""Under which conditions figures were taken: a number without them is none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch


def provenance(**versions: str) -> dict[str, object]:
    """Machine, commit, date, command, and versions of torch and of what else took part."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip(),
        "command": " ".join(sys.argv),
        "cpu": cpu,
        "cores": psutil.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        **versions,
    }
