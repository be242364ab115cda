"""The wire's two ends: a rank binds a ROUTER, a client connects a DEALER to each rank. CURVE and ZAP on both.

A handshake with a wrong key, or bytes that are no ZMTP, never reach the engine; libzmq drops them silently, so a
monitor logs each refusal.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Sequence
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from pegahpc.limited_log import LimitedLog
from pegahpc.wire.keys import FleetSecret

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 << 20
ZAP_DOMAIN = "pegahpc"
REFUSED = {
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
}


class _OneClientKey:
    """ZAP credentials: the fleet's client key (Z85) and no other."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == ZAP_DOMAIN and key == self._public


class RankSocket:
    """A rank's end. Not thread-safe: the engine's loop owns it.

    Args:
        host: address to bind; the port is chosen by the kernel and published in `endpoint`.
    """

    def __init__(self, host: str, secret: FleetSecret) -> None:
        self._context = zmq.Context()
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=_OneClientKey(secret.client_public))
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)  # a slow client must not stall a step; its own memory bounds it
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who is gone is told, instead of served for ever
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = secret.server_public, secret.server_secret
        socket.zap_domain = ZAP_DOMAIN.encode()
        self._watch(socket)
        port = socket.bind_to_random_port(f"tcp://{host}")
        self._socket = socket
        self.endpoint = f"tcp://{host}:{port}"

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._monitor = threading.Thread(
            target=self._log_refusals, args=(socket.get_monitor_socket(),), name="wire-monitor", daemon=True
        )
        self._monitor.start()

    def _log_refusals(self, monitor: zmq.Socket[bytes]) -> None:
        """Name each peer that was let go before its handshake was done (garbage ends without a failure event)."""
        num_shaking, limited = 0, LimitedLog(log)
        while True:
            event = zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"])
            if event == zmq.Event.MONITOR_STOPPED:
                monitor.close()
                return
            if event == zmq.Event.ACCEPTED:
                num_shaking += 1
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                num_shaking -= 1
            elif event in REFUSED or (event == zmq.Event.DISCONNECTED and num_shaking > 0):
                num_shaking -= 1
                limited.write(
                    logging.WARNING,
                    "refused handshakes",
                    "wire: refused a handshake on %s (%s)",
                    self.endpoint,
                    event.name,
                )

    def receive(self) -> tuple[bytes, bytes] | None:
        """(client, payload) of the next message, or None when nothing waits."""
        try:
            client, payload = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        except ValueError:  # not two frames: a client that is not ours in spirit, though it has the key
            return b"", b""
        return client, payload

    def wait(self, timeout_ms: float, doorbells: Sequence[int] = ()) -> bool:
        """Sleep until a message waits or one of these descriptors is readable, at most `timeout_ms`; True when so."""
        poller = zmq.Poller()
        for waited in (self._socket, *doorbells):
            poller.register(waited, zmq.POLLIN)
        return bool(poller.poll(round(timeout_ms)))

    def send(self, client: bytes, payload: bytes) -> None:
        """Queue one message; never blocks.

        Raises:
            ConnectionError: the client is gone.
        """
        try:
            self._socket.send_multipart((client, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise ConnectionError("the client is gone") from None

    def close(self) -> None:
        """Close the port and stop the threads."""
        self._socket.disable_monitor()
        self._monitor.join()
        self._socket.close()
        self._auth.stop()
        self._context.term()

    def __enter__(self) -> RankSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect_to_rank(context: zmq.asyncio.Context, endpoint: str, secret: FleetSecret) -> zmq.asyncio.Socket:
    """A client's end of one rank's wire, for asyncio: `await send(bytes)`, `await recv()`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(8))  # kept over reconnects: an Abort still finds its request
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.curve_serverkey = secret.server_public
    socket.curve_publickey, socket.curve_secretkey = secret.client_public, secret.client_secret
    socket.connect(endpoint)
    return socket
