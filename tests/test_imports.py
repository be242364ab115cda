"""What must be cheap to import stays cheap: a command line or a gateway that waits for torch is felt by every user."""

import importlib.util
import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers")
LIGHT = (
    "pegahpc.atomic",
    "pegahpc.bench.command",
    "pegahpc.checkpoint.manifest",
    "pegahpc.config",
    "pegahpc.gateway.app",
    "pegahpc.gateway.main",
    "pegahpc.launch.cli",
    "pegahpc.launch.tray",
    "pegahpc.models.lines",
    "pegahpc.plan",
    "pegahpc.rank",
    "pegahpc.vocabulary",
    "pegahpc.wire.messages",
    "pegahpc.wire.sockets",
)
PROBE = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def heavy_imports_of(module: str) -> list[str]:
    """The heavy packages that a fresh interpreter holds after importing the module."""
    command = [sys.executable, "-P", "-c", PROBE, module, *HEAVY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    found: list[str] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_does_not_import_torch_or_transformers(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not built yet")
    assert heavy_imports_of(module) == []


def test_the_probe_sees_a_heavy_import() -> None:
    assert heavy_imports_of("pegahpc.kernels.registry") == ["torch"]
