"""The MPI collectives under a real mpirun: the same tokens and the same chain as any other dispatcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import build, request, run
from oracles import SHAPE, save_tiny
from worlds import WORKER

WORLD_SIZE = 2


@pytest.mark.mpi
def test_ranks_that_mpirun_starts_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "v3", "v3-groups")
    shares = [[("a", [5, 6, 7], 12, {"temperature": 0.0})], [("b", list(range(9, 40)), 5, {"temperature": 0.0})]]
    job = {"world_size": WORLD_SIZE, "folder": str(folder), "num_experts": 8, "hidden": SHAPE["hidden_size"],
           "overrides": [], "dispatcher": "mpi", "requests_by_rank": shares}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parent)}
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(WORLD_SIZE)]
    done = subprocess.run(
        [*command, sys.executable, WORKER, tmp_path / "job.json"],
        env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    steps = {result["steps"] for result in results}
    assert len(results) == WORLD_SIZE and len(steps) == 1
    num_moe_layers = SHAPE["num_hidden_layers"] - SHAPE["first_k_dense_replace"]
    assert {result["exchanges"] for result in results} == {steps.pop() * num_moe_layers * 3}
    alone = run(build(folder), [request(name, prompt, num) for share in shares for name, prompt, num, _ in share])
    assert results[0]["tokens"] | results[1]["tokens"] == alone.tokens
