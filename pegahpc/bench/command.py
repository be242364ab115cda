"""`pegahpc bench run` from its options to its files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pegahpc.bench import provenance, served
from pegahpc.bench.claims import headline, no_claim_reasons
from pegahpc.bench.drive import Terms
from pegahpc.bench.figures import Limits, parse_limits
from pegahpc.bench.options import RunOptions, choose_form
from pegahpc.bench.points import Point
from pegahpc.bench.prompts import Material, TokenMaterial, WordMaterial
from pegahpc.bench.ready import OverHttp, Ready, Subject, model_folder, opened
from pegahpc.bench.records import Record
from pegahpc.bench.result import Result, raw_bytes, raw_of, write_result
from pegahpc.bench.run import Course, Measurement, Watcher
from pegahpc.bench.trace import Trace
from pegahpc.bench.workload import Workload, WorkloadSpec
from pegahpc.config import ConfigError

HOW_TO_KNOW = {
    "code": "the fleet runs other code than this checkout, or neither a git commit nor a wheel tells which",
    "config": "the fleet's record has no configuration; start it anew",
    "model": "the checkpoint cannot be read from here",
    "hardware": "the fleet is on another host",
}


def run(options: RunOptions, subject: Subject, watcher: Watcher) -> tuple[Path, Result]:
    """Measure and write; the result and where it is.

    Raises:
        ConfigError: what the user can change; nothing was written.
        Unusable: the endpoint does not do what a measurement needs.
    """
    path = options.output_path()
    result, records = asyncio.run(_measure(options, subject, watcher, path))
    write_result(path, result, raw_bytes(records))
    return path, result


async def _measure(options: RunOptions, subject: Subject, watcher: Watcher, path: Path) -> tuple[Result, list[Record]]:
    trace, folder, labels = options.read_trace(), model_folder(subject), options.label_values()
    points, limits = options.points(), parse_limits(options.slo)  # all that may be refused comes before the target
    model = served.model_spec(folder)
    is_dense = model is not None and not model.num_experts  # identical prompts change nothing for it
    spec = options.workload(trace, allows_twins=options.allow_identical_prompts or is_dense)
    spec.check_batches(len(points) * options.repeats)
    material = _material(options, trace, folder, is_http=isinstance(subject, OverHttp))
    workload = Workload(spec, material)
    async with opened(options, subject, material) as ready:
        server = served.with_labels(ready.server, labels) | {"honoured": ready.honoured}
        _refuse_unknown(server)
        client = provenance.client(provenance.own_command())
        course = _course(options, ready, points, limits)
        cells, records = await Measurement(ready.target, workload, course, watcher).run()
    num_twins = 0 if is_dense else workload.num_twins
    no_claim = no_claim_reasons(cells, num_identical_prompts=num_twins, client=client, server=server)
    result = Result(
        headline=headline(cells, no_claim),
        no_claim=no_claim,
        client=client,
        server=server,
        labels=labels,
        workload=_document(options, spec, material),
        num_identical_prompts=num_twins,
        slo=options.slo,
        max_failures=options.max_failures,
        num_devices=course.num_devices,
        cells=cells,
        raw=raw_of(path, raw_bytes(records), len(records)),
    )
    return result, records


def _material(options: RunOptions, trace: Trace | None, folder: Path, *, is_http: bool) -> Material:
    known = TokenMaterial(options.vocab_size) if options.vocab_size else served.vocabulary(folder)
    knows_vocabulary = known is not None
    form = choose_form(
        options.prompts, trace=trace, num_turns=options.turns, knows_vocabulary=knows_vocabulary, is_http=is_http
    )
    if form != "tokens":
        return WordMaterial(form)
    if known is None and not (trace and len(trace.prompts) == len(trace.lines)):
        raise ConfigError("--prompts: token ids need the model's vocabulary; say --vocab-size, or --prompts text")
    return known or TokenMaterial(2)


def _refuse_unknown(server: dict[str, Any]) -> None:
    """What is ours must be known; of an endpoint that is not, a result without a claim may be written."""
    missing = provenance.missing(server)
    if missing and server["kind"] != "endpoint":
        said = "; ".join(f"{name} ({HOW_TO_KNOW[name]})" for name in missing)
        example = f"--label {missing[0]}=..."
        raise ConfigError(f"--label: numbers without provenance are refused. Missing: {said}. Say {example}")


def _course(options: RunOptions, ready: Ready, points: Sequence[Point], limits: Limits | None) -> Course:
    terms = Terms(
        timeout_s=options.timeout_s,
        has_exact_length=not options.stop_at_eos,
        think_s=options.think_s,
        seed=options.seed,
        opening_tokens=ready.opening_tokens,
    )
    return Course(
        points=points,
        num_repeats=options.repeats,
        num_warmup=options.warmup,
        terms=terms,
        limits=limits,
        num_devices=ready.num_devices,
        max_model_len=ready.max_model_len,
        max_failures=options.max_failures,
    )


def _document(options: RunOptions, spec: WorkloadSpec, material: Material) -> dict[str, Any]:
    """What was asked, apart from the points; two results are alike only if all of it is equal."""
    return {
        "seed": spec.seed,
        "num_requests": spec.num_requests,
        "input_tokens": spec.input_tokens.text,
        "output_tokens": spec.output_tokens.text,
        "shared_prefix": spec.shared_prefix,
        "num_prefixes": spec.num_prefixes,
        "num_turns": spec.num_turns,
        "think_s": spec.think_s,
        "trace_sha256": spec.trace.sha256 if spec.trace else None,
        "form": material.form,
        "vocabulary": material.size if isinstance(material, TokenMaterial) else None,
        "temperature": options.temperature,
        "ignore_eos": not options.stop_at_eos,
        "num_warmup": options.warmup,
        "timeout_s": options.timeout_s,
        "stall_s": options.stall_s,
    }
