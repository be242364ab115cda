"""The gateway's side of the processes that render chat templates: one a thread that asks, replaced when it is lost."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from pegahpc.gateway.errors import ApiError, refused_field
from pegahpc.gateway.template_messages import (
    Chat,
    Outcome,
    Refused,
    Rendered,
    TemplateSetup,
    TooMuch,
    decode_outcome,
    encode,
)

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-P", "-m", "pegahpc.gateway.template_worker"]
CPU_S = 2.0
WALL_S = 10.0  # for CPU_S on a busy machine; a process that is slower stands still
MEMORY_BYTES = 256 << 20  # and 16 times the largest body
OWN_CHARS = 1 << 16  # a template's own words, beside 4 times the largest body


class TemplateError(Exception):
    """The template does not compile within its bounds; the message says why."""


class TemplateLost(Exception):
    """The process ended, or stood still, instead of answering; the message says how."""


class TemplateStalled(TemplateLost):
    """It stood still."""


class TemplatePool:
    """Renders one template, for any thread and never in this process. Close it.

    Args:
        special_tokens: `bos_token` and the like, for the template to read.
        max_body_bytes: of a request; it bounds what a chat can need.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, max_body_bytes: int) -> None:
        self._setup = TemplateSetup(
            source=source,
            special_tokens=dict(special_tokens),
            cpu_s=CPU_S,
            memory_bytes=MEMORY_BYTES + 16 * max_body_bytes,
            max_chars=OWN_CHARS + 4 * max_body_bytes,
        )
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._alive: set[Worker] = set()
        self._is_closed = False

    def warm_up(self) -> None:
        """Start a process now, so that no request waits for that.

        Raises:
            TemplateError: the checkpoint's template is none, or does not compile within its bounds.
            TemplateLost: the process ended for another reason.
        """
        self._give_back(self._take())

    def render(self, chat: Chat) -> str:
        """The prompt's text, in a few times `WALL_S` at most: for a start and the call, and again after a loss.

        Raises:
            ApiError: 400 for what the template refuses and for what exceeds its bounds, 500 when it cannot be used,
                503 when its process was lost.
        """
        try:
            worker, outcome = self._render(encode(chat))
        except TemplateError as error:
            raise ApiError(500, f"The model's chat template cannot be used: {error}", code="template_failed") from None
        except TemplateLost as lost:
            log.error("a process that renders chats was lost: %s", lost)
            message = "The process that renders chats was lost; try again."
            raise ApiError(503, message, code="template_lost") from None
        if isinstance(outcome, TooMuch):
            self._end(worker)
            message = f"messages: rendering them by the model's chat template takes more than {outcome.what}"
            raise ApiError(400, message, param="messages", code="template_limit")
        self._give_back(worker)
        if isinstance(outcome, Refused):
            raise refused_field(outcome.param, outcome.message)
        return outcome.text

    def close(self) -> None:
        """End all processes; a thread that waits for one loses it."""
        with self._lock:
            self._is_closed = True
            alive = list(self._alive)
        for worker in alive:
            self._end(worker)

    def _render(self, line: bytes) -> tuple[Worker, Outcome]:
        """Twice if need be: a process that was killed has changed nothing, and another may live."""
        try:
            worker = self._take()
            return worker, self._ask(worker, line)
        except TemplateStalled:
            raise
        except TemplateLost as lost:
            log.warning("a process that renders chats was lost: %s; another begins", lost)
        worker = self._start()
        return worker, self._ask(worker, line)

    def _take(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> Worker:
        with self._lock:
            if self._is_closed:
                raise TemplateLost("the gateway ends")
            worker = Worker()
            self._alive.add(worker)
        outcome = self._ask(worker, encode(self._setup))
        if not isinstance(outcome, Rendered):
            self._end(worker)
            words = outcome.message if isinstance(outcome, Refused) else f"it takes more than {outcome.what}"
            raise TemplateError(words)
        return worker

    def _ask(self, worker: Worker, line: bytes) -> Outcome:
        try:
            return worker.ask(line)
        except TemplateLost:
            self._end(worker)
            raise

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _end(self, worker: Worker) -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.end()


class Worker:
    """One process of `template_worker`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=theirs.fileno())
        ours.settimeout(WALL_S)
        self._socket = ours
        self._lines = ours.makefile("rb")

    def ask(self, line: bytes) -> Outcome:
        """Its answer; `TooMuch` when it was killed for its CPU time.

        Raises:
            TemplateLost: it ended otherwise, or said nothing for `WALL_S`.
        """
        try:
            self._socket.sendall(line + b"\n")
            answer = self._lines.readline()
        except TimeoutError:
            raise TemplateStalled(f"it stood still for {WALL_S:g} s") from None
        except OSError:
            answer = b""  # it has ended
        if answer:
            return decode_outcome(answer)
        status = self._process.wait(WALL_S)
        if status == -signal.SIGPROF:
            return TooMuch(f"{CPU_S:g} s of CPU time")
        raise TemplateLost(f"it ended with status {status}")

    def end(self) -> None:
        """Kill it, and leave no zombie. Again, and while `ask` waits, is no error."""
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._socket.close()
