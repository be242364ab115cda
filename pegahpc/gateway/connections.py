"""Who may hold a connection: bounded in number, strangers only briefly, so that nobody without a key can shut the port.

A stranger is a connection on which no valid key has come yet. When the last place is taken, the stranger that has been
quiet for longest makes room; clients with a key keep theirs.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from pegahpc.gateway.error_responses import from_aiohttp, to_response
from pegahpc.gateway.errors import ApiError, shorten
from pegahpc.gateway.request_ids import HEADER, new_id, request_id
from pegahpc.limited_log import LimitedLog

log = logging.getLogger(__name__)

BACKLOG = 128
ACCEPTS_A_TURN = 32  # of the event loop; more would hold up the streams
STRANGER_S = 10.0  # for a complete header, and from one to the next
KEEPALIVE_S = 75.0  # between two requests of a client with a key; nginx's own number, above every client's pool
SWEEP_S = 1.0
NO_FILES_PAUSE_S = 0.2
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
REFUSAL_BODY = ApiError(503, "The gateway has no connection left; try again.", code="too_many_connections").encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"%s: %%s\r\nContent-Length: %d\r\n\r\n" % (HEADER.encode(), len(REFUSAL_BODY))
)


class Connection(web.RequestHandler):
    """One client's connection: a stranger until `on_header` says otherwise."""

    __slots__ = ("_door", "quiet_since_s")

    def __init__(self, door: Door, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp documents it, and does not declare it
            logger=log,
        )
        self._door = door
        self.quiet_since_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is there."""
        super().connection_made(transport)
        self._door.strangers[self] = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """The transport is gone."""
        super().connection_lost(exc)
        self._door.forget(self)

    def on_header(self, *, has_key: bool) -> None:
        """A request's header has come."""
        strangers = self._door.strangers
        if self in strangers:
            del strangers[self]
            if not has_key:
                self.quiet_since_s = time.monotonic()
                strangers[self] = None  # the last in line

    def drop(self) -> None:
        """Close at once; what the client has not read is lost."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What cannot be parsed gets one line in the log, and the OpenAI error body."""
        reason = shorten(" ".join((message or str(exc) or type(exc).__name__).split()))
        if status < 500:
            self._door.log.write(logging.INFO, "bad requests", "%s sent no HTTP: %s", request.remote, reason)
            error = ApiError(status, f"The request is no valid HTTP: {reason}", code="invalid_http")
        else:
            self._door.log.write(
                logging.ERROR, "failures", "the gateway failed on request %s", request_id(request), exc_info=exc
            )
            error = ApiError(status, "The gateway failed on this request; its log says why.", code="internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        response = to_response(error)
        response.headers[HEADER] = request_id(request)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """What aiohttp refuses before any handler is asked has the OpenAI error body too."""
        if isinstance(resp, web.HTTPException):
            resp = to_response(from_aiohttp(request, resp))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: object, **kw: object) -> None:
        """aiohttp's own word for what went wrong outside of a handler."""
        message, *rest = args
        error = kw.get("exc_info")
        if isinstance(error, web.RequestPayloadError):  # a body that nobody waits for any more is broken too
            return
        self._door.log.write(
            logging.ERROR, "failures", str(message), *rest, exc_info=error if isinstance(error, BaseException) else None
        )


class Door:
    """Accepts connections for a server. Use as an async context; leaving stops accepting and closes nothing.

    asyncio's own accept loop tries, and logs, `backlog` times whenever a process is out of files.

    Args:
        listener: bound, not yet listening.
        max_connections: those that may be open at once; the process needs ACCEPTS_A_TURN more files than that.
    """

    def __init__(self, server: web.Server, listener: socket.socket, *, max_connections: int) -> None:
        self.strangers: dict[Connection, None] = {}  # quiet for longest first
        self.log = LimitedLog(log)
        self._server = server
        self._listener = listener
        self._max_connections = max_connections
        self._open: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Door:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        self._start(self._sweep(), name="stranger-sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self.strangers.pop(connection, None)
        self._open.discard(connection)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in NO_FILES:
                    self.log.write(logging.ERROR, "out of files", "no connection can be accepted: %s", error)
                    self._make_room()
                    asyncio.get_running_loop().remove_reader(self._listener)  # it stays readable
                    self._start(self._pause(), name="accept-pause")
                    return
                continue  # this client has left already
            client.setblocking(False)
            if len(self._open) >= self._max_connections and not self._make_room():
                self._refuse(client)
            else:
                connection = Connection(self, self._server)
                self._open.add(connection)
                self._start(self._adopt(connection, client), name="accepted")

    def _make_room(self) -> bool:
        """Drop the stranger that has been quiet for longest; False when there is none."""
        if not self.strangers:
            return False
        stranger = next(iter(self.strangers))
        del self.strangers[stranger]
        self.log.write(
            logging.WARNING, "dropped", "%d connections are open; a quiet one without a key is dropped", len(self._open)
        )
        stranger.drop()
        return True

    def _refuse(self, client: socket.socket) -> None:
        self.log.write(logging.WARNING, "refused", "%d connections are open; another is refused", len(self._open))
        with client:
            try:
                client.send(REFUSAL % new_id().encode() + REFUSAL_BODY)
            except OSError:
                return  # it has left

    async def _adopt(self, connection: Connection, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            client.close()
            self.forget(connection)
            self.log.write(logging.WARNING, "accepted", "an accepted connection failed: %s", error)

    async def _pause(self) -> None:
        await asyncio.sleep(NO_FILES_PAUSE_S)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _sweep(self) -> None:
        """Close strangers that sent no complete header in their time."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.log.end_windows()
            bound_s = time.monotonic() - STRANGER_S
            for stranger in [stranger for stranger in self.strangers if stranger.quiet_since_s < bound_s]:
                del self.strangers[stranger]
                stranger.drop()

    def _start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
