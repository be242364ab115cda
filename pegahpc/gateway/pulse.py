"""The gateway's pulse: a line on standard output four times a second, for the head tray.

It comes from the event loop itself: while a call on the loop does not return there is no pulse, whatever the
process's other threads still do.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pegahpc.gateway.boot import BEAT_S, Beat, encode_word


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Beat for as long as the context lasts."""
    task = asyncio.create_task(_beat(sys.stdout.fileno()), name="pulse")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _beat(fd: int) -> None:
    """Until the reader is gone. One that does not read misses beats, and holds up nothing."""
    line, poll = encode_word(Beat()), select.poll()
    poll.register(fd, select.POLLOUT)
    while True:
        for _, events in poll.poll(0):
            if events & (select.POLLERR | select.POLLHUP):
                return
            os.write(fd, line)  # does not block: a pipe that is writable takes a line whole
        await asyncio.sleep(BEAT_S)
