"""`pegahpc bench run` from its options to its files: who is asked, how, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pegahpc.bench import provenance, served
from pegahpc.bench.answers import Target
from pegahpc.bench.drive import Terms
from pegahpc.bench.endpoint import Endpoint, look, probe
from pegahpc.bench.engine_target import EngineTarget
from pegahpc.bench.figures import parse_limits
from pegahpc.bench.http_target import HttpSettings, HttpTarget
from pegahpc.bench.options import RunOptions, choose_form
from pegahpc.bench.prompts import Form, Material, TokenMaterial, WordMaterial
from pegahpc.bench.records import Record
from pegahpc.bench.result import Result, raw_bytes, raw_of, write_result
from pegahpc.bench.run import Course, Watcher, headline, measure, no_claim_reasons
from pegahpc.bench.served import KnownFleet
from pegahpc.bench.trace import Trace
from pegahpc.bench.updates import Asking
from pegahpc.bench.wire_target import WireTarget
from pegahpc.bench.workload import Workload, WorkloadSpec
from pegahpc.config import ConfigError
from pegahpc.gateway.text_files import eos_token_ids
from pegahpc.gateway.tokenizer import TextCodec
from pegahpc.plan import Plan


@dataclass(frozen=True, kw_only=True)
class OverHttp:
    """An endpoint: of a fleet that is known, or anybody's.

    Args:
        model: which of its models; None: its only one.
    """

    url: str
    api_key: str | None
    model: str | None
    fleet: KnownFleet | None = None


@dataclass(frozen=True)
class OverWire:
    """The ranks of a fleet, without its gateway."""

    fleet: KnownFleet


@dataclass(frozen=True)
class InProcess:
    """An engine that is built here."""

    plan: Plan


Subject = OverHttp | OverWire | InProcess


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A target that answers, and all that is known of it.

    Args:
        honoured: fields beyond OpenAI's that the endpoint was found to honour.
    """

    target: Target
    server: dict[str, Any]
    num_devices: int | None
    max_model_len: int | None
    honoured: list[str]


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
    labels, limits, points, trace = (
        options.label_values(),
        parse_limits(options.slo),
        options.points(),
        options.read_trace(),
    )
    folder = model_folder(subject)
    model = served.model_spec(folder)
    is_dense = model is not None and not model.num_experts
    spec = options.workload(trace, allows_twins=options.allow_identical_prompts or is_dense)
    material = _material(options, subject, trace, folder)
    workload = Workload(spec, material)
    terms = Terms(
        timeout_s=options.timeout_s,
        has_exact_length=not options.stop_at_eos,
        think_s=options.think_s,
        seed=options.seed,
    )
    async with _ready(options, subject, material) as ready:
        server = served.with_labels(ready.server, labels)
        missing = provenance.missing(server)
        if missing and ready.server["kind"] != "endpoint":
            raise _refusal(missing)
        course = Course(
            points=points,
            num_repeats=options.repeats,
            num_warmup=options.warmup,
            terms=terms,
            limits=limits,
            num_devices=ready.num_devices,
            max_model_len=ready.max_model_len,
            max_failures=options.max_failures,
        )
        client = provenance.client(provenance.own_command())
        cells, records = await measure(ready.target, workload, course, watcher)
    code = server["code"] if isinstance(server["code"], dict) else client["code"]
    num_twins = 0 if is_dense else workload.num_twins
    no_claim = no_claim_reasons(cells, num_twins=num_twins, missing=missing, code=code)
    result = Result(
        headline=headline(cells, no_claim),
        no_claim=no_claim,
        client=client,
        server={**server, "honoured": ready.honoured},
        labels=labels,
        workload=_document(options, spec, material),
        slo=options.slo,
        num_devices=ready.num_devices,
        cells=cells,
        raw=raw_of(path, raw_bytes(records), len(records)),
    )
    return result, records


def model_folder(subject: Subject) -> Path:
    """Where the checkpoint is, as far as that is known; else a folder that is none."""
    if isinstance(subject, InProcess):
        return Path(subject.plan.fleet.model.path)
    return subject.fleet.model_folder if subject.fleet is not None else Path("/nowhere")


def _material(options: RunOptions, subject: Subject, trace: Trace | None, folder: Path) -> Material:
    known = TokenMaterial(options.vocab_size) if options.vocab_size else served.vocabulary(folder)
    form = choose_form(
        options.prompts,
        trace=trace,
        num_turns=options.turns,
        knows_vocabulary=known is not None,
        is_http=isinstance(subject, OverHttp),
    )
    if form != "tokens":
        return WordMaterial(form)
    if known is None and not (trace and len(trace.prompts) == len(trace.lines)):
        raise ConfigError("--prompts: token ids need the model's vocabulary; say --vocab-size, or --prompts text")
    return known or TokenMaterial(2)


@asynccontextmanager
async def _ready(options: RunOptions, subject: Subject, material: Material) -> AsyncIterator[Ready]:
    """The target, open; closed on leaving."""
    if isinstance(subject, OverHttp):
        async with HttpTarget(_settings(options, subject, material.form)) as http:
            yield await _ready_endpoint(options, subject, material, http)
        return
    folder = model_folder(subject)
    stop_ids = eos_token_ids(folder, TextCodec(folder)) if options.stop_at_eos else ()
    asking = Asking(options.temperature, stop_ids)
    if isinstance(subject, InProcess):
        async with EngineTarget(subject.plan, asking=asking, stall_s=options.stall_s) as engine:
            num_devices = _all_devices(options, 1)
            limit = subject.plan.fleet.model.max_model_len
            server = await asyncio.to_thread(served.of_engine, subject.plan)
            yield Ready(
                target=engine, server=server, num_devices=num_devices, max_model_len=limit, honoured=["ignore_eos"]
            )
        return
    fleet = subject.fleet
    async with WireTarget(
        fleet.endpoints,
        fleet.secret,
        asking=asking,
        model_folder=folder,
        page_tokens=fleet.config["engine"]["page_tokens"],
        stall_s=options.stall_s,
    ) as wire:
        yield Ready(
            target=wire,
            server=await asyncio.to_thread(served.of_fleet, fleet, kind="wire"),
            num_devices=_all_devices(options, len(fleet.devices)),
            max_model_len=fleet.max_model_len,
            honoured=["ignore_eos"],
        )


async def _ready_endpoint(options: RunOptions, subject: OverHttp, material: Material, http: HttpTarget) -> Ready:
    endpoint = await look(http, subject.model)
    http.settings = replace(http.settings, model=endpoint.card.id)
    http.settings = await probe(http, material, seed=options.seed)
    fleet = subject.fleet
    counted = len(fleet.devices) if fleet else endpoint.num_ranks
    return Ready(
        target=http,
        server=await asyncio.to_thread(_server, fleet, endpoint, subject.url),
        num_devices=_all_devices(options, counted),
        max_model_len=endpoint.card.max_model_len,
        honoured=_honoured(http.settings),
    )


def _server(fleet: KnownFleet | None, endpoint: Endpoint, url: str) -> dict[str, Any]:
    return served.of_fleet(fleet, kind="fleet") if fleet else served.of_endpoint(endpoint, url)


def _settings(options: RunOptions, subject: OverHttp, form: Form) -> HttpSettings:
    is_exact = not options.stop_at_eos
    return HttpSettings(
        url=subject.url.rstrip("/"),
        api_key=subject.api_key,
        model=subject.model or "",
        form=form,
        temperature=options.temperature,
        stall_s=options.stall_s,
        extras={"ignore_eos": True} if is_exact else {},
        stream_extras={"continuous_usage_stats": True},
        sends_min_tokens=is_exact,
    )


def _honoured(settings: HttpSettings) -> list[str]:
    return [*settings.extras, *settings.stream_extras, *(["min_tokens"] if settings.sends_min_tokens else [])]


def _all_devices(options: RunOptions, counted: int | None) -> int | None:
    """Every device of the fleet counts; fewer would make figures a device too good."""
    if counted is not None and options.num_gpus not in (None, counted):
        raise ConfigError(f"--num-gpus: {options.num_gpus} is not the {counted} ranks that serve; all of them count")
    return counted or options.num_gpus


def _refusal(missing: list[str]) -> ConfigError:
    hints = {
        "code": "the fleet runs other code than this checkout, or neither a git commit nor a wheel tells which",
        "config": "the fleet's record has no configuration; start it anew",
        "model": "the checkpoint cannot be read from here",
        "hardware": "the fleet is on another host",
    }
    said = "; ".join(f"{name} ({hints[name]})" for name in missing)
    return ConfigError(
        f"--label: numbers without provenance are refused. Missing: {said}. Say --label {missing[0]}=..."
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
