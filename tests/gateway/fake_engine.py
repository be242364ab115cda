"""A rank that speaks the real wire from a thread and says what a test tells it to say."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from pegahpc.wire.keys import FleetSecret
from pegahpc.wire.messages import (
    HEARTBEAT_S,
    Abort,
    Aborted,
    Attach,
    ExpertLoads,
    Finished,
    KvEvents,
    Load,
    PhaseTimes,
    Request,
    RequestUpdate,
    Scheduled,
    StepOutputs,
    TokenLogprob,
    decode_to_rank,
    encode,
)
from pegahpc.wire.sockets import RankSocket

IDLE = Load(num_running=0, num_waiting=0, used_pages=0, total_pages=100)
Script = Callable[[Request], Sequence[RequestUpdate]]


def told(token: int, logprob: float = -0.5, rank: int = 1, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
    """A token's logprob; by default it is the only one."""
    return TokenLogprob(token, logprob, rank, list(top) or [(token, logprob)])


def updates_for(
    request: Request,
    steps: Sequence[Sequence[int]],
    reason: str = "stop",
    *,
    num_cached: int | None = None,
    logprob_of: Callable[[int], TokenLogprob] = told,
) -> list[RequestUpdate]:
    """One update a step, the terminal in the last; the counts, and the logprobs, are those of a correct engine."""
    updates = [RequestUpdate(id=request.id, tokens=list(tokens)) for tokens in steps] or [RequestUpdate(id=request.id)]
    if request.logprobs is not None:
        for update in updates:
            update.logprobs = [logprob_of(token) for token in update.tokens]
    if request.prompt_logprobs is not None:
        updates[0].prompt_logprobs = [logprob_of(token) for token in request.prompt_tokens[1:]]
    updates[0].scheduled = Scheduled(queued_at_s=1.0, scheduled_at_s=1.5)
    updates[0].cached_tokens = num_cached
    updates[-1].terminal = Finished(
        reason="stop" if reason == "stop" else "length",
        prompt_tokens=len(request.prompt_tokens),
        completion_tokens=sum(map(len, steps)),
    )
    return updates


class FakeEngine:
    """Answers each request with what `script` says, one message an update; requests and aborts are kept.

    Set `is_frozen` to stop its pulse, `load`, `phases` and `experts` to what it reports, `is_holding` to answer all but
    the last update, `num_together` to answer only when so many requests are there, each in turn. `pages` is what its
    prefix cache has when a client attaches, `says_snapshot` whether it says so then.
    """

    def __init__(self, rank: int, secret: FleetSecret) -> None:
        self.rank = rank
        self.requests: list[Request] = []
        self.aborts: list[str] = []
        self.load = IDLE
        self.phases: PhaseTimes | None = None
        self.experts: ExpertLoads | None = None
        self.pages: list[bytes] = []
        self.says_snapshot = True
        self.is_frozen = False
        self.is_holding = False
        self.num_together = 1
        self.pause_s = 0.0
        self.script: Script = lambda request: updates_for(request, [[2]])
        self.secret = secret
        self._open: set[str] = set()
        self._gathered: list[Request] = []
        self.step = 0
        self._events: deque[KvEvents] = deque()
        self._is_ready = threading.Event()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fake-rank-{rank}")
        self._thread.start()
        assert self._is_ready.wait(10)

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def change_cache(self, *, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        """Pages come and go, and the client is told."""
        self.pages = [name for name in [*self.pages, *stored] if name not in removed]
        self._events.append(KvEvents(stored=list(stored), removed=list(removed)))

    def wait_for_abort(self, request_id: str, within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while request_id not in self.aborts:
            assert time.monotonic() < deadline, f"no abort of {request_id} within {within_s} s"
            time.sleep(0.005)

    def wait_for_request(self, num_requests: int = 1, within_s: float = 5.0) -> Request:
        deadline = time.monotonic() + within_s
        while len(self.requests) < num_requests:
            assert time.monotonic() < deadline, f"no request within {within_s} s"
            time.sleep(0.005)
        return self.requests[num_requests - 1]

    def _run(self) -> None:
        with RankSocket("127.0.0.1", self.secret) as self._socket:
            self.endpoint = self._socket.endpoint
            self._client = b""
            self._is_ready.set()
            said_s = time.monotonic()
            while not self._is_stopping.is_set():
                self._socket.wait(10)
                while (received := self._socket.receive()) is not None:
                    self._client = received[0]
                    self._take(received[1])
                while self._events:
                    self._say([], self._events.popleft())
                if time.monotonic() - said_s > HEARTBEAT_S / 4:
                    said_s = time.monotonic()
                    self._say([])

    def _take(self, payload: bytes) -> None:
        match decode_to_rank(payload):
            case Attach():
                self._say([], KvEvents(stored=self.pages, is_snapshot=True) if self.says_snapshot else None)
            case Abort(id=request_id):
                self.aborts.append(request_id)
                if request_id in self._open:
                    self._open.discard(request_id)
                    self._say([RequestUpdate(id=request_id, terminal=Aborted())])
            case Request() as request:
                self.requests.append(request)
                self._open.add(request.id)
                self._gathered.append(request)
                if len(self._gathered) >= self.num_together:
                    gathered, self._gathered = self._gathered, []
                    if not self.is_frozen:
                        self._answer(gathered)

    def _answer(self, requests: Sequence[Request]) -> None:
        """A message for each turn, with an update of each request that has one."""
        answers = [self.script(request)[: -1 if self.is_holding else None] for request in requests]
        for turn in zip_longest(*answers):
            time.sleep(self.pause_s)
            updates = [update for update in turn if update is not None]
            self._say(updates)
            self._open -= {update.id for update in updates if update.terminal is not None}

    def _say(self, updates: list[RequestUpdate], events: KvEvents | None = None) -> None:
        if self._client and not self.is_frozen:
            self.step += 1
            outputs = StepOutputs(
                rank=self.rank,
                step=self.step,
                load=self.load,
                updates=updates,
                kv_events=events,
                phases=self.phases,
                experts=self.experts,
            )
            with contextlib.suppress(ConnectionError):  # the gateway may be gone
                self._socket.send(self._client, encode(outputs))
