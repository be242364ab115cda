"""The gateway process. One msgpack document on stdin says all; JSON lines on stdout: its loop turns, it listens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from pegahpc.config import ConfigError
from pegahpc.gateway.app import drain, farewell, make_app
from pegahpc.gateway.appkeys import ENGINES, MODEL
from pegahpc.gateway.boot import GatewayBoot, Listening, encode_word
from pegahpc.gateway.connections import Door
from pegahpc.gateway.pulse import beating
from pegahpc.gateway.rank_link import AttachError
from pegahpc.log_lines import configure_logging
from pegahpc.wire.keys import FleetSecret

log = logging.getLogger("pegahpc.gateway")  # __name__ is __main__ here

STUCK_CLIENT_MS = 120_000  # a client that takes no byte for so long is cut off, and its place is free
CLEANUP_AFTER_FAILURE_S = 0.3  # the launcher kills a gateway that is slower than its patience
NUM_OWN_FILES = 128  # logs, threads, connections that are being accepted or closed
NUM_FILES_A_RANK = 8  # its socket, and what libzmq wakes us with
NUM_IDLE_CONNECTIONS = 1024  # beyond those whose requests have a place: pools of clients, probes, strangers
MIN_CONNECTIONS = 16
EXIT_FAILED = 1
EXIT_CONFIG = 2


def main() -> int:
    """Serve until SIGTERM, or SIGUSR1 when the fleet has failed.

    Exit status 0: drained; 1: a rank did not answer, or the fleet failed; 2: a setting is wrong.
    """
    configure_logging()
    try:
        boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=GatewayBoot)
        max_connections = _max_connections(boot)
        with _bind(boot.host, boot.port) as listener:
            app = make_app(boot.fleet, FleetSecret.load(Path(boot.secret_path)), boot.endpoints)
            return asyncio.run(_run(app, listener, max_connections))
    except (ConfigError, msgspec.MsgspecError, OSError) as error:
        return _end_with(EXIT_CONFIG, error)
    except AttachError as error:
        return _end_with(EXIT_FAILED, error)


def _end_with(status: int, error: Exception) -> int:
    """The log's last line is the reason, and nothing else: the launcher shows it."""
    print(error, file=sys.stderr)
    return status


def _max_connections(boot: GatewayBoot) -> int:
    """How many clients may be connected. Each is an open file: raise that limit, and say when it is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_requests = boot.fleet.gateway.max_concurrent_requests
    wanted = num_requests + NUM_IDLE_CONNECTIONS
    num_own = NUM_OWN_FILES + NUM_FILES_A_RANK * len(boot.endpoints)
    if most == resource.RLIM_INFINITY or most >= wanted + num_own:
        return wanted
    if most < num_requests + num_own:
        log.warning(
            "%d open files are allowed (ulimit -Hn); gateway.max_concurrent_requests=%d wants %d",
            most,
            num_requests,
            wanted + num_own,
        )
    return max(most - num_own, MIN_CONNECTIONS)


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow is done; nobody is answered until it listens.

    Raises:
        ConfigError: the port is taken, or the host is no address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"gateway.host: {host!r} is no address: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_CLIENT_MS)  # accepted sockets inherit it
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"gateway.port: {port} is taken on {host}; choose another, or gateway.port=0 for any free one"
            ) from None
        raise ConfigError(f"gateway.host: cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


async def _run(app: web.Application, listener: socket.socket, max_connections: int) -> int:
    """Serve, with a pulse from the first turn of the event loop to the last."""
    async with beating():
        return await _serve(app, listener, max_connections)


async def _serve(app: web.Application, listener: socket.socket, max_connections: int) -> int:
    """Set up, say so, and serve until told to end; before it listens, a signal just ends it. The exit status."""
    stopping, failing = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def fail() -> None:
        failing.set()
        stopping.set()

    loop.add_signal_handler(signal.SIGUSR1, fail)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    try:
        if await _set_up(app, runner, stopping):
            assert runner.server is not None
            async with Door(runner.server, listener, max_connections=max_connections):
                _announce(listener)
                await stopping.wait()
                await _end(app, failing)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLEANUP_AFTER_FAILURE_S if failing.is_set() else None):
                await runner.cleanup()
    return EXIT_FAILED if failing.is_set() else 0


async def _end(app: web.Application, failing: asyncio.Event) -> None:
    """Drain; when the fleet has failed, or fails meanwhile, there is nothing to drain to."""
    if not failing.is_set():
        log.info("draining")
        draining = asyncio.create_task(drain(app), name="drain")
        failed = asyncio.create_task(failing.wait(), name="failed")
        await asyncio.wait((draining, failed), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, failed):
            task.cancel()
        await asyncio.gather(draining, failed, return_exceptions=True)
    if failing.is_set():
        log.error("the fleet has failed; %d open requests are told so", app[ENGINES].num_open)
        await farewell(app)


async def _set_up(app: web.Application, runner: web.AppRunner, stopping: asyncio.Event) -> bool:
    """True when every rank has answered; False when told to end while waiting for that."""
    setup = asyncio.create_task(_start(app, runner), name="setup")
    stop = asyncio.create_task(stopping.wait(), name="stop")
    await asyncio.wait((setup, stop), return_when=asyncio.FIRST_COMPLETED)
    for task in (setup, stop):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stop
    with contextlib.suppress(asyncio.CancelledError):
        await setup
        return True
    return False


async def _start(app: web.Application, runner: web.AppRunner) -> None:
    warm_up = asyncio.create_task(asyncio.to_thread(app[MODEL].warm_up), name="warm-up")
    try:
        await runner.setup()
        await warm_up
    finally:
        warm_up.cancel()


def _announce(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    os.write(sys.stdout.fileno(), encode_word(Listening(host=host, port=port)))
    log.info("listening on http://%s:%d", host, port)


if __name__ == "__main__":
    sys.exit(main())
