"""A name for each request, in its answer and in each line of the log that is about it."""

from __future__ import annotations

import logging
import random
import re

from aiohttp import web

from pegahpc.gateway.errors import ApiError
from pegahpc.limited_log import LimitedLog

HEADER = "X-Request-Id"
SANE = re.compile(r"[\x21-\x7e]{1,128}")
NAME = web.RequestKey("request_id", str)
ANSWER = web.RequestKey("answer_id", str)  # of the answer's documents, and of the request on the ranks


def new_id() -> str:
    """Unique, not secret: no system call."""
    return f"{random.getrandbits(128):032x}"


def request_id(request: web.BaseRequest) -> str:
    """The client's own X-Request-Id if it can stand in a header and in a log, else one that is made once."""
    if NAME not in request:
        given = request.headers.get(HEADER, "")
        request[NAME] = given if SANE.fullmatch(given) else new_id()
    return request[NAME]


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams included."""
    response.headers[HEADER] = request_id(request)


def log_failure(log: LimitedLog, request: web.Request, error: ApiError) -> None:
    """One line for what was not the client's fault, with the ids by which client and ranks know the request."""
    answer = request.get(ANSWER, "no answer begun")
    log.write(
        logging.WARNING,
        f"answers {error.status} {error.body.code}",
        "request %s (%s) %s %s: %d %s: %s",
        request_id(request),
        answer,
        request.method,
        request.path,
        error.status,
        error.body.code,
        error.body.message,
    )
