"""Around every handler: the key, the OpenAI error body, the count of answers."""

from __future__ import annotations

import asyncio
import hmac
import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from pegahpc.gateway.appkeys import API_KEY, FAILURES, METRICS
from pegahpc.gateway.connections import Connection
from pegahpc.gateway.error_responses import from_aiohttp, to_response
from pegahpc.gateway.errors import ApiError, shorten
from pegahpc.gateway.request_ids import log_failure, request_id

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health",)
CLIENT_LEFT = 499  # nginx's word for it; only ever seen in the metrics


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: whatever happens inside becomes one answer, and one count."""
    status = CLIENT_LEFT
    try:
        response = await _call(request, handler)
        status = response.status
        return response
    finally:
        route = request.match_info.route.resource
        request.app[METRICS].count_response(route.canonical if route else "unknown", status)


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every path but /health needs the bearer key, those that do not exist included."""
    has_key = _has_key(request)
    if isinstance(request.protocol, Connection):
        request.protocol.on_header(has_key=has_key)
    if not has_key and request.path not in OPEN_PATHS:
        raise ApiError(401, "A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key")
    return await handler(request)


def _has_key(request: web.Request) -> bool:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    given = key.strip().encode("utf-8", "surrogateescape")
    return kind.lower() == "bearer" and hmac.compare_digest(given, request.app[API_KEY])


async def _call(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error)
    except web.HTTPException as error:
        return _refusal(request, from_aiohttp(request, error))
    except web.RequestPayloadError as error:
        return _refusal(request, ApiError(400, f"The body cannot be read: {shorten(str(error))}", code="invalid_body"))
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception:
        log.exception("request %s: %s %s failed", request_id(request), request.method, request.path)
        return to_response(
            ApiError(500, "The gateway failed on this request; its log says why.", code="internal_error")
        )


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    if error.status >= 500:
        log_failure(request.app[FAILURES], request, error)
    return to_response(error)
