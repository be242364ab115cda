"""An engine's wire in memory: messages in, messages out, and what the loop did in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pegahpc.engine.loop import Engine
from pegahpc.wire.messages import (
    Abort,
    Attach,
    Load,
    Request,
    RequestUpdate,
    StepOutputs,
    Terminal,
    decode_outputs,
    encode,
)


class MemoryInbox:
    """What the loop needs of a socket. `wait` returns at once, and counts."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[bytes, bytes]] = deque()
        self.sent: list[tuple[bytes, StepOutputs]] = []
        self.waits_ms: list[float] = []

    def put(self, client: bytes, *messages: Attach | Request | Abort | bytes) -> None:
        """Let messages of a client wait; bytes go as they are."""
        for message in messages:
            self.waiting.append((client, message if isinstance(message, bytes) else encode(message)))

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.waiting.popleft() if self.waiting else None

    def wait(self, timeout_ms: float, doorbells: list[int]) -> bool:
        self.waits_ms.append(timeout_ms)
        return bool(self.waiting)

    def send(self, client: bytes, payload: bytes) -> None:
        self.sent.append((client, decode_outputs(payload)))

    def updates(self, client: bytes) -> list[RequestUpdate]:
        """All that one client was told, in order."""
        return [update for to, outputs in self.sent if to == client for update in outputs.updates]

    def tokens(self, client: bytes, name: str) -> list[int]:
        """One request's tokens."""
        return [token for update in self.updates(client) if update.id == name for token in update.tokens]

    def terminals(self, client: bytes, name: str) -> list[Terminal]:
        """One request's terminals: one, if all is well."""
        return [update.terminal for update in self.updates(client) if update.id == name and update.terminal is not None]

    def loads(self, client: bytes) -> list[Load]:
        """The load in every message to a client."""
        return [outputs.load for to, outputs in self.sent if to == client]


def turn(engine: Engine, inbox: MemoryInbox) -> None:
    """One round of the loop: drain, step, publish."""
    engine.drain(inbox)
    engine.step()
    engine.publish(inbox)


def turns(engine: Engine, inbox: MemoryInbox, *, most: int = 2000, until: Callable[[], bool] | None = None) -> int:
    """Rounds until nothing is left to do (or `until`); how many there were."""
    for count in range(1, most + 1):
        turn(engine, inbox)
        if until() if until is not None else not (engine.scheduler.has_work or inbox.waiting):
            return count
    raise AssertionError(f"not done after {most} rounds")
