"""The recipe's command line: corpus, distill, train, accept, in this order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tiny_moe.presets import PRESETS

app = typer.Typer(no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="where to write")]


@app.command()
def corpus(out: Out, num_docs: int = 160_000, seed: int = 0) -> None:
    """Write the grammar's corpus; a seed fixes each byte."""
    from tiny_moe.corpus import write_corpus

    write_corpus(out, num_docs, seed)


@app.command()
def distill(gguf: Path, out: Out, seconds: float = 300.0, batch_size: int = 2048, seed: int = 1) -> None:
    """Sample stories from SmolLM2-135M-Instruct, read from a GGUF file."""
    from tiny_moe import distill

    distill.distill(gguf, out, distill.Sampling(seconds=seconds, batch_size=batch_size, seed=seed))


@app.command()
def train(
    corpora: Annotated[list[Path], typer.Argument(help="text files, each document followed by a line <|end|>")],
    out: Out,
    preset: Annotated[str, typer.Option(help=f"one of {', '.join(PRESETS)}")] = "laptop",
    num_steps: Annotated[int | None, typer.Option(help="instead of the preset's")] = None,
    seed: int = 0,
    use_compile: Annotated[bool, typer.Option("--compile", help="torch.compile the losses")] = False,
) -> None:
    """Train tokenizer and network, and write the checkpoint."""
    from tiny_moe.train import train

    if preset not in PRESETS:
        raise typer.BadParameter(f"{preset!r} is none of {', '.join(PRESETS)}", param_hint="--preset")
    chosen = PRESETS[preset]
    chosen = chosen if num_steps is None else dataclasses.replace(chosen, num_steps=num_steps)
    train(chosen, corpora, out, seed=seed, use_compile=use_compile)


@app.command()
def accept(folder: Path) -> None:
    """Check a checkpoint with transformers; exit 1 with the complaints if it is not good."""
    from tiny_moe.accept import accept

    if complaints := accept(folder):
        raise SystemExit("\n".join(complaints))


app()
