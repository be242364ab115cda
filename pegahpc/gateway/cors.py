"""Web pages that may use the gateway from a browser: those of `gateway.cors_origins`, by default none.

Without an origin in that list no answer has any of these headers, and a browser shows a page nothing. The key is needed
all the same; only the browser's own question beforehand (the preflight) comes without it.

**Source** the Fetch standard, "HTTP-CORS protocol" (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from pegahpc.gateway.request_ids import HEADER

ANY = "*"
PREFLIGHT_S = "600"  # that a browser may remember the answer


def allow_origins(app: web.Application, origins: Collection[str]) -> None:
    """Answer preflights of pages from these origins, and let their browsers show them our answers. None: do nothing."""
    if not origins:
        return

    def allowed(request: web.BaseRequest) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None:
            return None
        return ANY if ANY in origins else origin if origin in origins else None

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not is_preflight or allowed(request) is None:
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ""),
            hdrs.ACCESS_CONTROL_MAX_AGE: PREFLIGHT_S,
        }
        return web.Response(status=204, headers=headers)

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if (origin := allowed(request)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = f"{HEADER}, {hdrs.RETRY_AFTER}"

    app.middlewares.insert(1, answer_preflight)
    app.on_response_prepare.append(mark)
