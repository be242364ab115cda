"""A gateway program without HTTP: it binds, says so, and leaves on SIGTERM, or on SIGUSR1 with a word.

With `taken` its port is taken.
"""

import signal
import socket
import sys

import msgspec

from pegahpc.gateway.boot import GatewayBoot, Listening


def main() -> None:
    """Run the pretended gateway."""
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=GatewayBoot)
    if "taken" in sys.argv:
        sys.stderr.write("2026-01-01 00:00:00,000 gateway ERROR __main__: gateway.port: 80 is taken\n")
        sys.exit(2)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    listener = socket.create_server((boot.host, boot.port))
    line = msgspec.json.encode(Listening(host=boot.host, port=listener.getsockname()[1]))
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
    if signal.sigwait([signal.SIGTERM, signal.SIGUSR1]) == signal.SIGUSR1:
        sys.stderr.write("told the clients that the fleet has failed\n")


if __name__ == "__main__":
    main()
