"""Who is asked: an endpoint, the ranks of a fleet, or an engine built here; opened, and known as far as can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pegahpc.bench import served
from pegahpc.bench.answers import Target
from pegahpc.bench.endpoint import Unusable, look, probe
from pegahpc.bench.engine_target import EngineTarget
from pegahpc.bench.http_target import HttpSettings, HttpTarget
from pegahpc.bench.options import RunOptions
from pegahpc.bench.prompts import Form, Material
from pegahpc.bench.served import KnownFleet
from pegahpc.bench.updates import Asking
from pegahpc.bench.wire_target import WireTarget
from pegahpc.config import ConfigError
from pegahpc.gateway.text_files import eos_token_ids
from pegahpc.gateway.tokenizer import TextCodec
from pegahpc.plan import Plan

ALWAYS_HONOURED = ["ignore_eos"]  # by what takes no stop tokens but those that it is given


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
        honoured: fields beyond OpenAI's that it was found to honour.
        opening_tokens: that all its prompts may begin with (`endpoint.probe`).
    """

    target: Target
    server: dict[str, Any]
    num_devices: int | None
    max_model_len: int | None
    honoured: list[str]
    opening_tokens: int = 0


def model_folder(subject: Subject) -> Path:
    """Where the checkpoint is, as far as that is known; else a folder that is none."""
    if isinstance(subject, InProcess):
        return Path(subject.plan.fleet.model.path)
    return subject.fleet.model_folder if subject.fleet is not None else Path("/nowhere")


@asynccontextmanager
async def opened(options: RunOptions, subject: Subject, material: Material) -> AsyncIterator[Ready]:
    """The target, ready to be asked; closed on leaving.

    Raises:
        ConfigError, Unusable: it cannot be measured like that.
    """
    if isinstance(subject, OverHttp):
        async with HttpTarget(_settings(options, subject, material.form)) as http:
            yield await _endpoint(options, subject, material, http)
        return
    folder = model_folder(subject)
    asking = Asking(options.temperature, eos_token_ids(folder, TextCodec(folder)) if options.stop_at_eos else ())
    if isinstance(subject, InProcess):
        async with EngineTarget(subject.plan, asking=asking, stall_s=options.stall_s) as engine:
            yield await _engine(options, subject.plan, engine)
    else:
        async with WireTarget(subject.fleet, asking=asking, stall_s=options.stall_s) as wire:
            yield await _wire(options, subject.fleet, wire)


async def _endpoint(options: RunOptions, subject: OverHttp, material: Material, http: HttpTarget) -> Ready:
    endpoint = await look(http, subject.model)
    http.settings = replace(http.settings, model=endpoint.card.id)
    try:
        async with asyncio.timeout(options.timeout_s):
            opening_tokens = await probe(http, material, seed=options.seed)
    except TimeoutError:
        raise Unusable(f"{subject.url}: a first request was not answered within {options.timeout_s:g} s") from None
    fleet = subject.fleet
    known = served.of_endpoint(endpoint, subject.url) if fleet is None else await _of_fleet(fleet, "fleet")
    return Ready(
        target=http,
        server=known,
        num_devices=all_devices(options, endpoint.num_ranks if fleet is None else len(fleet.devices)),
        max_model_len=endpoint.card.max_model_len,
        honoured=_honoured(http.settings),
        opening_tokens=opening_tokens,
    )


async def _engine(options: RunOptions, plan: Plan, engine: EngineTarget) -> Ready:
    return Ready(
        target=engine,
        server=await asyncio.to_thread(served.of_engine, plan),
        num_devices=all_devices(options, 1),
        max_model_len=plan.fleet.model.max_model_len,
        honoured=ALWAYS_HONOURED,
    )


async def _wire(options: RunOptions, fleet: KnownFleet, wire: WireTarget) -> Ready:
    return Ready(
        target=wire,
        server=await _of_fleet(fleet, "wire"),
        num_devices=all_devices(options, len(fleet.devices)),
        max_model_len=fleet.max_model_len,
        honoured=ALWAYS_HONOURED,
    )


async def _of_fleet(fleet: KnownFleet, kind: str) -> dict[str, Any]:
    return await asyncio.to_thread(served.of_fleet, fleet, kind=kind)


def _settings(options: RunOptions, subject: OverHttp, form: Form) -> HttpSettings:
    """Everything is asked for; the probe takes off what is refused."""
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


def all_devices(options: RunOptions, counted: int | None) -> int | None:
    """How many serve; None: nobody says.

    Raises:
        ConfigError: --num-gpus says otherwise than the fleet. Fewer would make figures a device too good.
    """
    if counted is not None and options.num_gpus not in (None, counted):
        raise ConfigError(f"--num-gpus: {options.num_gpus} is not the {counted} ranks that serve; all of them count")
    return counted or options.num_gpus
