"""An engine in this process as a target: one rank with all experts, its loop in a thread, no socket in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from types import TracebackType

from pegahpc.bench.answers import Answer, Ask
from pegahpc.bench.experts import Counts, counts_of
from pegahpc.bench.prompts import Form
from pegahpc.bench.updates import Asking, Pending
from pegahpc.config import ConfigError
from pegahpc.plan import Plan
from pegahpc.rank import RankContext
from pegahpc.wire.messages import Abort, Request, decode_outputs, encode

CLIENT = b"bench"


class EngineTarget:
    """Builds the engine of a resolved configuration on entering. Times are taken in the engine's own thread.

    Raises:
        ConfigError: the topology has more than one rank.
    """

    form: Form = "tokens"

    def __init__(self, plan: Plan, *, asking: Asking, stall_s: float) -> None:
        if plan.fleet.topology.world_size != 1:
            raise ConfigError(
                f"topology: --engine builds one rank in this process, not {plan.fleet.topology.world_size};"
                " use topology=ep1, or start a fleet and measure it with --wire"
            )
        self._plan = plan
        self._asking = asking
        self._stall_s = stall_s
        self._waiting: deque[bytes] = deque()
        self._rings = threading.Event()
        self._is_stopping = threading.Event()

    async def __aenter__(self) -> EngineTarget:
        self._pending = Pending(self._stall_s)
        await asyncio.to_thread(self._build)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopping.set()
        self._rings.set()
        await asyncio.to_thread(self._thread.join)

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """One request; cancelled, it is aborted."""
        request = self._asking.request(ask)
        entry = self._pending.open(request.id, answer)
        self._put(request)
        try:
            await self._pending.wait(entry)
        finally:
            if self._pending.close(request.id):
                self._put(Abort(request.id))

    async def expert_counts(self) -> Counts | None:
        """The engine's own."""
        return counts_of([self._engine.expert_loads()])

    # What the engine's loop needs of a socket; called in its thread.

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next message."""
        self._rings.clear()
        return (CLIENT, self._waiting.popleft()) if self._waiting else None

    def wait(self, timeout_ms: float, doorbells: list[int]) -> bool:
        """Sleep until there is a message."""
        return self._rings.wait(timeout_ms / 1e3)

    def send(self, client: bytes, payload: bytes) -> None:
        """One step's message."""
        self._pending.deliver(decode_outputs(payload).updates, time.monotonic())

    def _build(self) -> None:
        from pegahpc.engine.build import build_engine  # torch: not for those who measure over HTTP
        from pegahpc.moe.dispatch import LocalDispatcher

        device = self._plan.fleet.cluster.device
        context = RankContext(
            rank=0,
            world_size=1,
            tray=0,
            num_trays=1,
            local_rank=0,
            device=device if device == "cpu" else f"{device}:0",
            bind_host="127.0.0.1",
        )
        dispatcher = LocalDispatcher(self._plan.num_experts)
        self._engine = build_engine(self._plan.fleet, context, dispatcher=dispatcher, progress=lambda stage, done: None)

    def _run(self) -> None:
        try:
            self._engine.run(self, self._is_stopping.is_set)
        except Exception as error:  # the thread's border: whoever waits is told
            self._pending.fail_all(f"{type(error).__name__}: {error}")
        else:
            self._pending.fail_all("the engine has left")

    def _put(self, message: Request | Abort) -> None:
        self._waiting.append(encode(message))
        self._rings.set()
