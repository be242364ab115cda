"""The gateway's application: its routes, what surrounds them, and what lives as long as it does."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from aiohttp import web

from pegahpc.config import FleetConfig
from pegahpc.gateway.admission import Gate
from pegahpc.gateway.appkeys import API_KEY, ENGINES, FAILURES, FLEET, GATE, METRICS, MODEL, OPENAPI, TOKENIZER_POOL
from pegahpc.gateway.cors import allow_origins
from pegahpc.gateway.documents import ModelCard, ModelList
from pegahpc.gateway.engines import Engines
from pegahpc.gateway.errors import FLEET_ENDED, ApiError, shorten
from pegahpc.gateway.generate import chat_completions, completions
from pegahpc.gateway.health import health
from pegahpc.gateway.metrics import GatewayMetrics
from pegahpc.gateway.middlewares import answer_errors, check_key
from pegahpc.gateway.model import ServedModel
from pegahpc.gateway.openapi import make_document
from pegahpc.gateway.request_ids import add_request_id
from pegahpc.gateway.uploads import expect
from pegahpc.limited_log import LimitedLog
from pegahpc.wire.keys import FleetSecret

log = logging.getLogger(__name__)

NUM_TOKENIZER_THREADS = 2
CLOSING_S = 2.0  # for handlers to write their last event after a drain that took too long
FAREWELL_S = 0.5  # for handlers to write their last event after the fleet has failed
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(fleet: FleetConfig, secret: FleetSecret, endpoints: Sequence[str]) -> web.Application:
    """The application of one fleet. Setting it up waits for every rank, in the order of `endpoints`.

    Raises:
        ConfigError: the model's tokenizer files are missing or damaged (here, before anything is opened).
    """
    app = web.Application(middlewares=[answer_errors, check_key], client_max_size=fleet.gateway.max_body_bytes)
    app[FLEET] = fleet
    app[API_KEY] = secret.api_key.encode()
    app[MODEL] = ServedModel(
        fleet.model,
        default_max_tokens=fleet.gateway.default_max_tokens,
        page_tokens=fleet.engine.page_tokens if fleet.engine.prefix_cache else 0,
        names_pages=len(endpoints) > 1,
        max_body_bytes=fleet.gateway.max_body_bytes,
    )
    app[OPENAPI] = make_document(fleet.model.name)
    app[GATE] = Gate(fleet.gateway.max_concurrent_requests)
    app[METRICS] = GatewayMetrics(fleet.model.name)
    app[FAILURES] = LimitedLog(log)
    app.on_response_prepare.append(add_request_id)
    allow_origins(app, fleet.gateway.cors_origins)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions, expect_handler=expect),
            web.post("/v1/completions", completions, expect_handler=expect),
            web.get("/v1/models", models),
            web.get("/v1/models/{model:.+}", model),
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/openapi.json", openapi),
        ]
    )

    async def with_engines(app: web.Application) -> AsyncIterator[None]:
        async with Engines(
            endpoints,
            secret,
            metrics=app[METRICS],
            affinity_load_bound=fleet.gateway.affinity_load_bound,
            stall_s=fleet.gateway.stall_s,
            attach_timeout_s=fleet.fleet.ready_timeout_s,
        ) as engines:
            app[ENGINES] = engines
            yield

    app.cleanup_ctx.extend([with_tokenizer_pool, with_engines])
    return app


async def with_tokenizer_pool(app: web.Application) -> AsyncIterator[None]:
    """Threads that render templates and tokenize, so that a long prompt does not hold up the streams."""
    pool = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
    app[TOKENIZER_POOL] = pool
    try:
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        app[MODEL].close()


async def drain(app: web.Application) -> None:
    """Refuse new work, let running work finish within `fleet.drain_timeout_s`, end the rest with a clear word."""
    app[GATE].is_draining = True
    timeout_s = app[FLEET].fleet.drain_timeout_s
    if not await app[GATE].wait_until_empty(timeout_s):
        app[ENGINES].fail_all(f"The fleet shut down; the request was not done within {timeout_s:g} s.")
        await app[GATE].wait_until_empty(CLOSING_S)


async def farewell(app: web.Application) -> None:
    """The fleet has failed: tell everyone who waits, now, and refuse the rest."""
    app[GATE].has_ended = True
    deadline_s = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline_s:
        app[ENGINES].fail_all(FLEET_ENDED)  # again for those that were still being tokenized
        if await app[GATE].wait_until_empty(FAREWELL_S / 10):
            return


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return _json(ModelList(data=[_card(request.app[MODEL])]))


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}."""
    name = request.match_info["model"]
    if name != request.app[MODEL].name:
        raise ApiError(404, f"The model {shorten(name)!r} does not exist.", param="model", code="model_not_found")
    return _json(_card(request.app[MODEL]))


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    return web.Response(body=request.app[METRICS].render(), headers={"Content-Type": METRICS_TYPE})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return web.Response(body=request.app[OPENAPI], content_type="application/json")


def _card(served: ServedModel) -> ModelCard:
    return ModelCard(id=served.name, created=served.loaded_at, max_model_len=served.max_model_len)


def _json(document: ModelCard | ModelList) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
