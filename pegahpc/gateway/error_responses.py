"""From errors to HTTP responses: each with OpenAI's body, and the headers of its status."""

from __future__ import annotations

from aiohttp import hdrs, web

from pegahpc.gateway.errors import ApiError, shorten

CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    413: "request_too_large",
    417: "expectation_failed",
}


def to_response(error: ApiError) -> web.Response:
    """The answer to a request that failed before anything of it was sent."""
    return web.Response(
        status=error.status, body=error.encode(), content_type="application/json", headers=error.headers
    )


def from_aiohttp(request: web.BaseRequest, error: web.HTTPException) -> ApiError:
    """What aiohttp says by itself: no such route, another method, a body that is too large, an unknown expectation."""
    messages = {
        404: f"There is no {shorten(request.path)} here.",
        405: f"{shorten(request.path)} does not take {shorten(request.method)}.",
        413: "The body is larger than gateway.max_body_bytes.",
        417: f"There is no {shorten(request.headers.get(hdrs.EXPECT, ''))!r} to expect here.",
    }
    headers = {name: value for name, value in error.headers.items() if name == hdrs.ALLOW}
    return ApiError(
        error.status, messages.get(error.status, error.reason), code=CODES.get(error.status), headers=headers
    )
