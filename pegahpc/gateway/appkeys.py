"""The things that handlers share, one key each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from pegahpc.config import FleetConfig
from pegahpc.gateway.admission import Gate
from pegahpc.gateway.engines import Engines
from pegahpc.gateway.metrics import GatewayMetrics
from pegahpc.gateway.model import ServedModel
from pegahpc.limited_log import LimitedLog

FLEET = web.AppKey("fleet", FleetConfig)
API_KEY = web.AppKey("api_key", bytes)
MODEL = web.AppKey("model", ServedModel)
OPENAPI = web.AppKey("openapi", bytes)
GATE = web.AppKey("gate", Gate)
METRICS = web.AppKey("metrics", GatewayMetrics)
FAILURES = web.AppKey("failures", LimitedLog)
ENGINES = web.AppKey("engines", Engines)
TOKENIZER_POOL = web.AppKey("tokenizer_pool", ThreadPoolExecutor)
