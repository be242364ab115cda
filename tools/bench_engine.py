"""The engine beside transformers in one run: time a token, rate, memory. What `make bench` prints and keeps.

Both sides run in this process on one thread in float32, in turn, several rounds; the best round of each counts, so
that a busy machine shifts both alike. The floor is what the weights alone allow: the bytes that a step must read,
over the bandwidth at which this machine reads as many bytes from memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import transformers
import typer
from bench_provenance import provenance
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV3ForCausalLM
from transformers.utils import logging as transformers_logging

from pegahpc.atomic import write_atomically
from pegahpc.config import compose_fleet
from pegahpc.engine.build import build_engine
from pegahpc.engine.loop import Engine
from pegahpc.models.lines import probe, read_config
from pegahpc.models.spec import MoEFFN
from pegahpc.moe.dispatch import LocalDispatcher
from pegahpc.plan import Plan, resolve
from pegahpc.rank import RankContext
from pegahpc.wire.messages import Request, Sampling

PROMPT_TOKENS = 20
OUTPUT_TOKENS = 60
BATCHES = (1, 32)


@dataclass(frozen=True)
class Row:
    """One batch size, both sides, best of the rounds."""

    batch: int
    floor_ms: float
    transformers_ms: float
    engine_ms: float
    engine_not_invariant_ms: float

    @property
    def speedup(self) -> float:
        """How many times the engine's rate is that of transformers."""
        return self.transformers_ms / self.engine_ms

    @property
    def invariance_cost(self) -> float:
        """What row invariance adds to a step, as a share."""
        return self.engine_ms / self.engine_not_invariant_ms - 1


def prompts(batch: int) -> list[list[int]]:
    """Distinct token ids, one list a request: alike prompts would share experts."""
    return [[1] + [6 + (7 * i + 13 * j) % 3000 for j in range(PROMPT_TOKENS - 1)] for i in range(batch)]


def new_engine(plan: Plan) -> Engine:
    """One rank with all experts."""
    context = RankContext(rank=0, world_size=1, tray=0, num_trays=1, local_rank=0, device="cpu", bind_host="127.0.0.1")
    dispatcher = LocalDispatcher(plan.num_experts)
    return build_engine(plan.fleet, context, dispatcher=dispatcher, progress=lambda stage, done: None)


def time_engine(engine: Engine, batch: int) -> float:
    """Milliseconds a decode step, all requests past their prompts."""
    for i, prompt in enumerate(prompts(batch)):
        request = Request(id=str(i), prompt_tokens=prompt, max_tokens=OUTPUT_TOKENS, sampling=Sampling(temperature=0))
        engine.submit(b"bench", request)
    while engine.scheduler.waiting or any(s.num_remaining > 1 for s in engine.scheduler.running.values()):
        engine.step()
        engine.outbox.take()
    started, num_steps = time.perf_counter(), 0
    while len(engine.scheduler.running) == batch:
        engine.step()
        engine.outbox.take()
        num_steps += 1
    elapsed_ms = (time.perf_counter() - started) * 1e3
    while engine.scheduler.has_work:
        engine.step()
        engine.outbox.take()
    return elapsed_ms / num_steps


def load_transformers(path: Path) -> Any:
    """The official class; the checkpoint's multi-token-prediction layer is left out, as the engine does."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    DeepseekV3ForCausalLM._keys_to_ignore_on_load_unexpected = [r"model\.layers\.6\..*"]
    model: Any = DeepseekV3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def time_transformers(model: Any, batch: int) -> float:
    """Milliseconds a token of `generate`, greedy, with its cache; the prompt's share is taken off."""

    def generate(num_tokens: int) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            model.generate(torch.tensor(prompts(batch)), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return (time.perf_counter() - started) * 1e3

    return (generate(OUTPUT_TOKENS) - generate(1)) / (OUTPUT_TOKENS - 1)


def floor_ms(plan: Plan, batch: int) -> float:
    """Time to read, once, the weights that a step of this batch touches (experts: at most all of them).

    As they are stored: the compiled products keep bfloat16 weights as such.
    """
    spec = probe(read_config(Path(plan.fleet.model.path)))
    unread = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size * 2  # embeddings: a row a token
    for ffn in spec.ffns:
        if isinstance(ffn, MoEFFN):
            idle = ffn.router.num_experts - min(ffn.router.num_experts, batch * ffn.router.num_topk)
            unread += idle * 3 * spec.hidden_size * ffn.intermediate_size * 2
    return (plan.weights_bytes_per_rank - unread) / read_bandwidth() * 1e3


def read_bandwidth() -> float:
    """Bytes a second of one thread summing 32 MB, best of ten."""
    block = torch.ones(8 << 20)

    def once() -> float:
        started = time.perf_counter()
        block.sum()
        return time.perf_counter() - started

    return block.numel() * 4 / min(once() for _ in range(10))


def measure(path: Path, rounds: int, say: Callable[[str], None]) -> tuple[list[Row], Plan]:
    """All batch sizes, both sides in turn."""
    base = ["topology=ep1", f"model.path={path}", "engine.num_threads=1", "cluster.device=cpu"]
    plans = [resolve(compose_fleet([*base, f"engine.row_invariant={flag}"])) for flag in ("true", "false")]
    engines = [new_engine(plan) for plan in plans]
    model = load_transformers(path)
    rows = []
    for batch in BATCHES:
        sides = [partial(time_transformers, model, batch), *(partial(time_engine, e, batch) for e in engines)]
        best = [float("inf")] * len(sides)
        for number in range(rounds):
            say(f"batch {batch}, round {number + 1} of {rounds}")
            best = [min(old, side()) for old, side in zip(best, sides, strict=True)]
        rows.append(Row(batch, floor_ms(plans[0], batch), *best))
    return rows, plans[0]


@dataclass(frozen=True)
class Start:
    """How a fleet of four ranks starts and what it holds."""

    ready_s: float  # from the command to ready, the gateway's port open
    rank_rss_mb: float  # the largest rank process


def measure_start(path: Path) -> Start:
    """`pegahpc up --detach topology=ep4`, its ranks' memory, and `down`."""
    command = [sys.executable, "-P", "-m", "pegahpc.launch.cli"]
    with tempfile.TemporaryDirectory() as home:
        at = ["--home", home, "--json"]
        started = time.perf_counter()
        override = [f"model.path={path}", "topology=ep4", "gateway.port=0", "cluster.device=cpu"]
        subprocess.run([*command, "up", "--detach", *at, *override], check=True, capture_output=True)
        ready_s = time.perf_counter() - started
        try:
            status = json.loads(subprocess.run([*command, "status", *at], check=True, capture_output=True).stdout)
            rss = max(psutil.Process(rank["pid"]).memory_info().rss for rank in status["ranks"])
        finally:
            subprocess.run([*command, "down", *at], check=True, capture_output=True)
    return Start(ready_s, rss / 1e6)


def main(
    path: Annotated[Path, typer.Option(help="a DeepSeek-V3 checkpoint")] = Path("assets/tiny-moe"),
    rounds: Annotated[int, typer.Option(help="rounds of both sides; the best counts")] = 3,
    output: Annotated[Path | None, typer.Option(help="write the figures here, as JSON")] = None,
) -> None:
    """Time the engine beside transformers and print the ratios."""
    torch.set_num_threads(1)
    path = path.resolve()
    console = Console()
    with console.status("measuring") as status:
        start = measure_start(path)
        rows, plan = measure(path, rounds, status.update)
    console.print(_table(rows, plan))
    console.print(f"EP4: ready after {start.ready_s:.1f} s; the largest rank process holds {start.rank_rss_mb:.0f} MB")
    if output is not None:
        figures = {"rows": [asdict(row) | {"speedup": row.speedup} for row in rows], "start": asdict(start)}
        write_atomically(
            output, json.dumps(provenance(transformers=transformers.__version__) | figures, indent=1).encode()
        )


def _table(rows: list[Row], plan: Plan) -> Table:
    table = Table(
        "batch", "floor ms", "transformers ms", "engine ms", "tok/s", "speed-up", "invariance",
        title=f"a decode step, one thread, {plan.fleet.engine.dtype}, {plan.line}",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row.batch), f"{row.floor_ms:.2f}", f"{row.transformers_ms:.2f}", f"{row.engine_ms:.2f}",
            f"{row.batch / row.engine_ms * 1e3:,.0f}", f"{row.speedup:.2f}x", f"{row.invariance_cost:+.0%}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
