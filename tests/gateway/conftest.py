"""A gateway on a free port, with fake ranks behind the real wire, and the official client in front."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from aiohttp import web
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer

from pegahpc.config import FleetConfig, compose_fleet
from pegahpc.gateway.app import make_app
from pegahpc.gateway.connections import Door
from pegahpc.wire.keys import FleetSecret
from tests.gateway.fake_engine import FakeEngine

if TYPE_CHECKING:
    from tests.gateway.real_rank import RealRank

# A busy machine makes no example wrong.
settings.register_profile("gateway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gateway")

TINY = Path(__file__).parents[2] / "assets" / "tiny-moe"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@dataclass
class Served:
    """A running gateway and its two sides; `engines` are those that a test can tell what to say."""

    app: web.Application
    runner: web.AppRunner
    engines: list[FakeEngine]
    url: str
    key: str
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    async def post(self, path: str, body: object, session: str = "") -> tuple[int, dict[str, Any]]:
        headers = {"X-Session-Id": session} if session else {}
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, **fields: object) -> tuple[int, dict[str, Any]]:
        body = {"model": "tiny-moe", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, **fields: object) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/completions", {"model": "tiny-moe", "prompt": "hi", **fields})

    async def complete_in(self, session: str, prompt: list[int]) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/completions", {"model": "tiny-moe", "prompt": prompt}, session)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def fleet_of() -> Callable[..., FleetConfig]:
    def compose(*overrides: str) -> FleetConfig:
        return compose_fleet(["gateway.stall_s=2.0", "fleet.drain_timeout_s=2.0", *overrides])

    return compose


@contextlib.asynccontextmanager
async def gateway_of(
    fleet: FleetConfig, secret: FleetSecret, endpoints: Sequence[str], *, max_connections: int = 1000
) -> AsyncIterator[Served]:
    """The gateway in front of ranks that are there; whose they are is the caller's to say."""
    app = make_app(fleet, secret, endpoints)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        assert runner.server is not None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            headers = {"Authorization": f"Bearer {secret.api_key}"}
            async with (
                Door(runner.server, listener, max_connections=max_connections),
                aiohttp.ClientSession(headers=headers) as http,
                openai.AsyncOpenAI(base_url=url + "/v1", api_key=secret.api_key, max_retries=0) as client,
            ):
                yield Served(app, runner, [], url, secret.api_key, http, client)
    finally:
        await runner.cleanup()


@pytest.fixture
def serve(fleet_of: Callable[..., FleetConfig]) -> Serve:
    @contextlib.asynccontextmanager
    async def started(*overrides: str, num_ranks: int = 1, max_connections: int = 1000) -> AsyncIterator[Served]:
        secret = FleetSecret.create()
        engines = [FakeEngine(rank, secret) for rank in range(num_ranks)]
        endpoints = [engine.endpoint for engine in engines]
        try:
            async with gateway_of(fleet_of(*overrides), secret, endpoints, max_connections=max_connections) as served:
                served.engines = engines
                yield served
        finally:
            for engine in engines:
                engine.close()

    return started


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as gateway:
        yield gateway


@pytest.fixture(scope="session")
def real_rank() -> Iterator[RealRank]:
    """One rank of the shipped model, for all tests that need real answers."""
    from tests.gateway.real_rank import RealRank  # torch, for those tests only

    with contextlib.closing(RealRank(TINY)) as rank:
        yield rank


@pytest.fixture
async def real(real_rank: RealRank, fleet_of: Callable[..., FleetConfig]) -> AsyncIterator[Served]:
    """The gateway in front of it."""
    async with gateway_of(fleet_of("gateway.stall_s=30"), real_rank.secret, [real_rank.endpoint]) as served:
        yield served
