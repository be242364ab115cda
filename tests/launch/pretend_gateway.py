"""A gateway program without HTTP: it binds, says so, has a pulse, and leaves on SIGTERM, or on SIGUSR1 with a word.

With `taken` its port is taken; with `hang` its pulse ends after a second.
"""

import asyncio
import signal
import socket
import sys
import time

import msgspec

from pegahpc.gateway.boot import GatewayBoot, Listening, encode_word
from pegahpc.gateway.pulse import beating


def main() -> None:
    """Run the pretended gateway."""
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=GatewayBoot)
    if "taken" in sys.argv:
        sys.stderr.write("2026-01-01 00:00:00,000 gateway ERROR __main__: gateway.port: 80 is taken\n")
        sys.exit(2)
    with socket.create_server((boot.host, boot.port)) as listener:
        asyncio.run(serve(listener.getsockname()[1], boot.host))


async def serve(port: int, host: str) -> None:
    """Until a signal comes."""
    stopped, failed, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, failed.set)
    async with beating():
        sys.stdout.buffer.write(encode_word(Listening(host=host, port=port)))
        sys.stdout.buffer.flush()
        if "hang" in sys.argv:
            loop.call_later(1, time.sleep, 1e9)
        told = [asyncio.create_task(event.wait()) for event in (stopped, failed)]
        await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
    if failed.is_set():
        sys.stderr.write("told the clients that the fleet has failed\n")


if __name__ == "__main__":
    main()
