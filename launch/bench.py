"""`pegahpc bench`: the options of its commands, and whom they mean. What is measured is in `pegahpc.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegahpc.config import ConfigError
from pegahpc.launch.printing import complain, print_json, print_rich, write

if TYPE_CHECKING:
    from pegahpc.bench.options import RunOptions
    from pegahpc.bench.ready import Subject
    from pegahpc.bench.result import Result

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
WHO, WHAT, HOW, COUNT, OUT = "Who is asked", "What is asked", "How it is offered", "What counts", "What comes of it"


@app.callback()
def bench() -> None:
    """Measure a fleet, any OpenAI endpoint, or an engine, and compare two measurements.

    First steps:

      pegahpc bench run                              the running fleet, 8 clients, 3 repeats
      pegahpc bench run --concurrency 1,4,16         one column each
      pegahpc bench run --rate 2,4 --slo ttft=500ms  Poisson arrivals, and how many were served in time
      pegahpc bench run --engine engine.dtype=float32 -o a.json
      pegahpc bench compare a.json b.json            ratios, or why there are none
    """


# Longer than a function may be: nearly all of it is the declaration of the options, which typer reads from here.
@app.command(context_settings={"allow_extra_args": True})
def run(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option("--url", help="Any OpenAI endpoint, up to and with /v1.", rich_help_panel=WHO)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Its model; default: the only one.", rich_help_panel=WHO)
    ] = None,
    key_env: Annotated[
        str, typer.Option("--key-env", help="Environment variable that has its API key.", rich_help_panel=WHO)
    ] = "OPENAI_API_KEY",
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File that has its API key.", rich_help_panel=WHO)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="A fleet of yours; default: the only one that lives.", rich_help_panel=WHO),
    ] = None,
    home: Annotated[
        str | None,
        typer.Option("--home", help="fleet.home; default: $PEGAHPC_HOME, else ~/.pegahpc.", rich_help_panel=WHO),
    ] = None,
    wire: Annotated[
        bool, typer.Option("--wire", help="The fleet's ranks themselves: no HTTP, no text.", rich_help_panel=WHO)
    ] = False,
    engine: Annotated[
        bool,
        typer.Option("--engine", help="An engine built here from Hydra overrides (topology=ep1).", rich_help_panel=WHO),
    ] = False,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num-gpus", help="All that serve, where the endpoint does not say.", rich_help_panel=WHO),
    ] = None,
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens",
            "-i",
            help="Lengths of prompts: 128, uniform:low=16,high=256, lognormal:mean=512,sigma=0.6,max=2048,"
            " geometric:mean=100.",
            rich_help_panel=WHAT,
        ),
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", "-t", help="Lengths of answers, alike.", rich_help_panel=WHAT)
    ] = "64",
    shared_prefix: Annotated[
        str,
        typer.Option(
            "--shared-prefix", help="Tokens that prompts begin with: 256, or 256x4 for 4 groups.", rich_help_panel=WHAT
        ),
    ] = "0",
    turns: Annotated[
        int, typer.Option("--turns", help="Requests of a conversation; its history grows.", rich_help_panel=WHAT)
    ] = 1,
    think: Annotated[
        float, typer.Option("--think", help="Seconds from an answer to the next turn.", rich_help_panel=WHAT)
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="JSONL: timestamp (s), and prompt or input_tokens, output_tokens.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts", help="tokens, text or chat; auto: ids where the vocabulary is known.", rich_help_panel=WHAT
        ),
    ] = "auto",
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", help="Token ids are below it.", rich_help_panel=WHAT)
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0: greedy.", rich_help_panel=WHAT)] = 0.0,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos", help="Answers may end early; else a short one is a failure.", rich_help_panel=WHAT
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of lengths, prompts and arrivals.", rich_help_panel=WHAT)] = 0,
    num_requests: Annotated[
        int | None,
        typer.Option("--num-requests", "-n", help="Of each repeat; default 64, of a trace all.", rich_help_panel=HOW),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", "-c", help="Closed loop: so many clients; several: 1,4,8.", rich_help_panel=HOW),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", "-r", help="Open loop: so many arrivals a second; several: 2,4.", rich_help_panel=HOW),
    ] = None,
    gamma_shape: Annotated[
        float,
        typer.Option("--gamma-shape", help="Of the gaps of --rate: 1 Poisson, below 1 bursts.", rich_help_panel=HOW),
    ] = 1.0,
    speed: Annotated[
        float | None, typer.Option("--speed", help="A trace's times, so many times as fast.", rich_help_panel=HOW)
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Below 3 nothing is known of the noise.", rich_help_panel=HOW)
    ] = 3,
    warmup: Annotated[
        int, typer.Option("--warmup", help="Requests before each point that do not count.", rich_help_panel=HOW)
    ] = 4,
    slo: Annotated[
        str | None,
        typer.Option("--slo", help="Limits of goodput: ttft=500ms,tpot=50ms,e2e=2s.", rich_help_panel=COUNT),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds; a request that takes longer failed.", rich_help_panel=COUNT)
    ] = 240.0,
    stall: Annotated[
        float, typer.Option("--stall", help="Seconds; a stream that pauses longer failed.", rich_help_panel=COUNT)
    ] = 60.0,
    max_failures: Annotated[
        float,
        typer.Option("--max-failures", help="Share that may fail; above it: exit status 1.", rich_help_panel=COUNT),
    ] = 0.0,
    allow_identical_prompts: Annotated[
        bool,
        typer.Option(
            "--allow-identical-prompts",
            help="Identical prompts choose identical experts; the result is marked.",
            rich_help_panel=COUNT,
        ),
    ] = False,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", help="key=value; code, config, model, hardware fill gaps in what is known.", rich_help_panel=OUT
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The result, a .json; raw requests go beside it.", rich_help_panel=OUT),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="PNG beside it: distributions, curves.", rich_help_panel=OUT)] = (
        False
    ),
    json: Annotated[bool, typer.Option("--json", help="Print the result instead of a table.", rich_help_panel=OUT)] = (
        False
    ),
) -> None:
    """Measure: the running fleet, --url of any endpoint, --wire of the fleet's ranks, or --engine OVERRIDES.

    Prompts are random and distinct, lengths and arrivals seeded.
    Whatever fails, stalls, is cut off or comes short is a failure, and exit status 1.
    The result is written only whole, with commit, model, configuration, machine,
    versions, command and seed; without them it is refused, or marked "no claim"
    for an endpoint that is not ours.

    Examples:

      pegahpc bench run -c 1,8,32 -i lognormal:mean=200,sigma=0.5,max=400 -t geometric:mean=60,max=100
      pegahpc bench run --turns 4 --think 0.5 --num-requests 64
      pegahpc bench run --url https://host/v1 --num-gpus 8 --label code=vllm-0.19 --label hardware=8xH200 ...
      pegahpc bench run --engine model=checkpoint model.path=/models/X model.name=x
    """
    from pegahpc.bench.options import RunOptions
    from pegahpc.launch.bench_subjects import endpoint_at, engine_of, read_key, running_fleet

    options = RunOptions(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_requests=num_requests,
        concurrency=concurrency,
        rate=rate,
        gamma_shape=gamma_shape,
        trace=trace,
        speed=speed,
        turns=turns,
        think_s=think,
        shared_prefix=shared_prefix,
        prompts=prompts,
        vocab_size=vocab_size,
        temperature=temperature,
        stop_at_eos=stop_at_eos,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
        slo=slo,
        timeout_s=timeout,
        stall_s=stall,
        max_failures=max_failures,
        allow_identical_prompts=allow_identical_prompts,
        num_gpus=num_gpus,
        labels=label or [],
        output=output,
        plot=plot,
    )
    if engine + wire + (url is not None) > 1:
        raise ConfigError("--url, --wire, --engine: choose one")
    if ctx.args and not engine:
        raise ConfigError(f"{ctx.args[0]}: overrides configure an engine that is built here; say --engine")
    subject: Subject
    if engine:
        subject = engine_of(ctx.args)
    elif url is not None:
        subject = endpoint_at(url, model=model, key=read_key(key_env, key_file))
    else:
        subject = running_fleet(home, name, model=model, is_wire=wire)
    _run(options, subject, json=json)


@app.command()
def compare(
    baseline: Annotated[Path, typer.Argument(help="A result of `pegahpc bench run`.")],
    current: Annotated[Path, typer.Argument(help="Another one, of the same requests.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare two results: ratios with the spread of both sides. Exit status 0: a claim is allowed, 1: it is not.

    Code, configuration, number of devices, and HTTP, wire or engine may differ: they are what is compared. No claim
    where requests, model, machine or versions differ, where provenance is missing or code has uncommitted changes,
    where requests failed, a cell is noisy or has fewer than 3 repeats, or figures do not follow from the raw requests.
    """
    from pegahpc.bench.compare import compare_files
    from pegahpc.bench.tables import comparison_table

    comparison = compare_files(baseline, current)
    if json:
        from dataclasses import asdict

        print_json({"claim_marker": comparison.claim_marker, **asdict(comparison)})
    else:
        print_rich(comparison_table(comparison))
    raise typer.Exit(1 if comparison.reasons else 0)


@app.command()
def show(
    result: Annotated[Path, typer.Argument(help="A result of `pegahpc bench run`.")],
    plot: Annotated[bool, typer.Option("--plot", help="Write its plots beside it.")] = False,
) -> None:
    """Print a result's table again, or draw its plots from the raw requests beside it."""
    from pegahpc.bench.options import check_plots
    from pegahpc.bench.result import read_result
    from pegahpc.bench.tables import result_table

    if plot:
        check_plots()
    document = read_result(result)
    print_rich(result_table(document))
    if plot:
        _plot(result, document)


def _run(options: RunOptions, subject: Subject, *, json: bool) -> None:
    from pegahpc.bench.command import run as run_bench
    from pegahpc.bench.endpoint import Unusable
    from pegahpc.bench.progress import ProgressBar
    from pegahpc.bench.tables import result_table

    try:
        with ProgressBar() as watcher:
            path, result = run_bench(options, subject, watcher)
    except Unusable as error:
        complain(f"nothing was measured: {error}")
        raise typer.Exit(1) from None
    if options.plot:
        _plot(path, result)
    if json:
        print_json(result)
    else:
        print_rich(result_table(result))
        write(f"{path}\n")
    has_failed = any(cell.marker in ("failed_or_timeout", "benchmark_error") for cell in result.cells)
    if has_failed:
        complain(result.headline)
    raise typer.Exit(1 if has_failed else 0)


def _plot(path: Path, result: Result) -> None:
    from pegahpc.bench.plots import plot
    from pegahpc.bench.result import read_raw

    records = read_raw(path, result)
    if records is None:
        raise ConfigError(f"--plot: {result.raw.name} is not beside {path.name}, or not the one that it was made from")
    for picture in plot(path, result, records):
        write(f"{picture}\n")
