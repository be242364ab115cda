"""How every process of a fleet logs: lines that begin with the time, so that they can be merged."""

from __future__ import annotations

import logging

LINE = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
TIME = "%Y-%m-%dT%H:%M:%S"


def configure_logging() -> None:
    """Log to standard error, which is this process's file under logs/."""
    logging.basicConfig(level=logging.INFO, format=LINE, datefmt=TIME, force=True)
