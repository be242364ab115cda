"""Who may import whom: the bench stands at the top of the framework, below the command line."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pegahpc"


def importers(of: str, *folders: str) -> set[str]:
    """Files below these parts of the package that import a module."""
    files = [file for folder in folders for file in (PACKAGE / folder).resolve().rglob("*.py")]
    return {file.name for file in files if f"from {of}" in file.read_text() or f"import {of}" in file.read_text()}


def test_only_the_command_line_imports_the_bench() -> None:
    others = ["engine", "gateway", "models", "layers", "checkpoint", "wire", "moe", "mla", "kernels", "slurm"]
    assert importers("pegahpc.bench", *others) == set()
    assert importers("pegahpc.bench", "launch") == {"bench.py", "bench_subjects.py"}


def test_the_bench_imports_nothing_of_the_launcher() -> None:
    assert importers("pegahpc.launch", "bench") == set()
    assert importers("pegahpc.config", "bench") != set()  # the scan sees imports
