"""Around every handler: the request's id, the key, the OpenAI error body, the count of answers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import re

from aiohttp import web
from aiohttp.typedefs import Handler

from pegahpc.gateway.appkeys import API_KEY, METRICS
from pegahpc.gateway.connections import Connection
from pegahpc.gateway.errors import ApiError, shorten

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health",)
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_LEFT = 499  # nginx's word for it; only ever seen in the metrics
CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large"}


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


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams included: the client's own X-Request-Id, or a new one."""
    given = request.headers.get("X-Request-Id", "")
    response.headers["X-Request-Id"] = given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def _has_key(request: web.Request) -> bool:
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    given = key.strip().encode("utf-8", "surrogateescape")
    return kind.lower() == "bearer" and hmac.compare_digest(given, request.app[API_KEY])


async def _call(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _response(error)
    except web.HTTPException as error:
        return _response(_from_aiohttp(request, error))
    except web.RequestPayloadError as error:
        return _response(ApiError(400, f"The body cannot be read: {shorten(str(error))}", code="invalid_body"))
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _response(ApiError(500, "The gateway failed on this request; its log says why.", code="internal_error"))


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    messages = {
        404: f"There is no {shorten(request.path)} here.",
        405: f"{request.path} does not take {request.method}.",
        413: "The body is larger than gateway.max_body_bytes.",
    }
    message = messages.get(error.status, error.reason)
    return ApiError(error.status, message, code=CODES.get(error.status))


def _response(error: ApiError) -> web.Response:
    response = web.Response(status=error.status, body=error.encode(), content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
