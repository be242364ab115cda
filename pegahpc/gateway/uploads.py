"""A request's body, read whole: bounded in size and time, and JSON in UTF-8."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from pegahpc.gateway.errors import ApiError, shorten

BODY_S = 60.0  # for a whole body; 17 kB/s for the default bound of a mebibyte
# What tools send when nobody told them the type: curl -d and urllib, and clients that post bytes.
UNTOLD_TYPES = ("application/x-www-form-urlencoded", "application/octet-stream")
CODINGS = ("", "identity", "gzip", "deflate", "br", "zstd")  # aiohttp refuses the last two without their libraries


async def read_body(request: web.Request) -> bytes:
    """The body, decompressed.

    Raises:
        ApiError: 408 when it takes too long, 415 when it says that it is no JSON in UTF-8.
        web.HTTPRequestEntityTooLarge: it is larger than the application's bound, or says that it is.
        web.RequestPayloadError: it breaks off, or its compression is broken.
    """
    _check_type(request)
    if not _may_come(request):
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        message = f"The body did not come within {BODY_S:g} s."
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


async def expect(request: web.Request) -> None:
    """`Expect: 100-continue`: ask for the body, unless it is refused already for its size.

    Raises:
        web.HTTPExpectationFailed: for any other expectation.
    """
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        raise web.HTTPExpectationFailed()
    if _may_come(request) and request.version >= (1, 1) and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _may_come(request: web.Request) -> bool:
    return (request.content_length or 0) <= request.client_max_size


def _check_type(request: web.Request) -> None:
    kind, charset = request.content_type, (request.charset or "utf-8").lower()
    is_told = hdrs.CONTENT_TYPE in request.headers and kind not in UNTOLD_TYPES
    is_json = kind == "application/json" or kind.endswith("+json")
    if (is_told and not is_json) or charset not in ("utf-8", "utf8", "us-ascii"):
        given = shorten(request.headers[hdrs.CONTENT_TYPE])
        raise ApiError(415, f"The body must be application/json in UTF-8, not {given}.", code="unsupported_media_type")
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "").lower()
    if coding not in CODINGS:
        message = f"A body in the coding {shorten(coding)!r} cannot be read; use gzip, deflate or none."
        raise ApiError(415, message, code="unsupported_media_type", headers={"Accept-Encoding": "gzip, deflate"})
