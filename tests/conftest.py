"""The one place that skips: a test whose marker names a thing that this machine lacks, saying which.

And the options that make some tests longer.
"""

from __future__ import annotations

import importlib.util
import shutil

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sizes of the tests that are worth running longer by hand than in CI."""
    parser.addoption("--chaos-rounds", type=int, default=5, help="rounds of tests/fleet/test_chaos.py")
    parser.addoption("--soak-requests", type=int, default=400, help="requests of tests/fleet/test_soak.py")
    parser.addoption(
        "--fuzz-examples", type=int, default=20, help="bodies of each kind in tests/gateway/test_openapi.py"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `chaos_round` runs once a round."""
    if "chaos_round" in metafunc.fixturenames:
        metafunc.parametrize("chaos_round", range(int(str(metafunc.config.getoption("chaos_rounds")))))


def _num_gpus() -> int:
    import torch  # only for tests that ask: a run without them must not pay for it

    return torch.cuda.device_count()


def _missing(marker: str) -> str:
    """What the marker needs and this machine lacks; empty if nothing."""
    if marker in ("gpu", "multi_gpu"):
        needed, found = (1 if marker == "gpu" else 2), _num_gpus()
        return "" if found >= needed else f"needs {needed} CUDA device(s), found {found}"
    if marker == "slurm":
        absent = [tool for tool in ("sbatch", "srun") if not shutil.which(tool)]
        return f"needs {' and '.join(absent)} on PATH" if absent else ""
    assert marker == "mpi"
    if not shutil.which("mpirun"):
        return "needs mpirun on PATH"
    return "" if importlib.util.find_spec("mpi4py") else "needs mpi4py"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here."""
    for marker in ("gpu", "multi_gpu", "slurm", "mpi"):
        if item.get_closest_marker(marker) and (missing := _missing(marker)):
            pytest.skip(missing)
