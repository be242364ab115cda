"""The engine of one rank: drain inbox -> admit -> plan -> step (always) -> apply -> publish.

No host condition decides whether a step runs: a rank without work steps over padding rows, because its experts may
be wanted. Ranks slow down and leave together, by the word of the chain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from pegahpc.engine.admission import refusal
from pegahpc.engine.logit_edits import LogitEdits
from pegahpc.engine.outbox import Outbox
from pegahpc.engine.phase_clock import PhaseClock
from pegahpc.engine.publisher import Publisher
from pegahpc.engine.readout import Told
from pegahpc.engine.runner import Runner
from pegahpc.engine.scheduler import Scheduler
from pegahpc.engine.sequence import Sequence, Span
from pegahpc.engine.status import StatusBlock
from pegahpc.moe.dispatch import HAS_WORK, STOPPING, ChainView, Dispatcher
from pegahpc.moe.layer import MoELayer
from pegahpc.page_names import root_name
from pegahpc.vocabulary import Vocabulary
from pegahpc.wire.messages import (
    Aborted,
    Attach,
    Draining,
    ExpertLoads,
    Failed,
    Finished,
    LayerExperts,
    Load,
    PhaseTimes,
    Rejected,
    RejectReason,
    Request,
    TokenLogprob,
    decode_to_rank,
)

log = logging.getLogger(__name__)

MAX_NON_FINITE_STEPS = 3
NON_FINITE = f"{MAX_NON_FINITE_STEPS} steps in a row gave non-finite logits"


class EngineError(RuntimeError):
    """The rank cannot go on; the fleet ends."""


class Inbox(Protocol):
    """What the loop needs of a RankSocket."""

    def receive(self) -> tuple[bytes, bytes] | None:
        """(client, payload) or None."""

    def wait(self, timeout_ms: float, doorbells: list[int]) -> bool:
        """Sleep until a message waits or a doorbell is readable; which rings it is left to its owner to take."""
        ...

    def send(self, client: bytes, payload: bytes) -> None:
        """Queue one message.

        Raises:
            ConnectionError: the client is gone.
        """


class Engine:
    """One rank. `run` owns the thread until the fleet leaves; everything else is for its parts and for tests."""

    def __init__(
        self,
        *,
        rank: int,
        scheduler: Scheduler,
        runner: Runner,
        dispatcher: Dispatcher,
        vocabulary: Vocabulary,
        max_model_len: int,
        idle_wait_ms: float,
        drain_timeout_s: float,
        prefix_salt: bytes | None,
    ) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.runner = runner
        self.dispatcher = dispatcher
        self.status = StatusBlock(dispatcher, self.phase_times)
        self.outbox = Outbox()
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._idle_wait_ms = idle_wait_ms
        self._drain_timeout_s = drain_timeout_s
        # Pages have names, and can be hit, only with a salt.
        self._named_page_tokens = 0 if prefix_salt is None else scheduler.pool.page_tokens
        self._root = b"" if prefix_salt is None else root_name(prefix_salt)
        self.clock = PhaseClock()
        self._publisher = Publisher(
            rank=rank,
            pool=scheduler.pool,
            read_load=self.load,
            read_times=self.phase_times,
            read_experts=self.expert_loads,
        )
        self._num_busy_steps = 0
        self._num_non_finite = 0
        self._is_stopping = False
        self._drain_until_s = 0.0

    def run(self, inbox: Inbox, is_stopping: Callable[[], bool]) -> None:
        """Step until every rank of the fleet wants to leave.

        All stopping in step N: all leave after step N + 1, so the step counts of all ranks are equal.
        """
        leaving = False
        while True:
            if is_stopping() and not self._is_stopping:
                self._is_stopping, self._drain_until_s = True, time.monotonic() + self._drain_timeout_s
            self.drain(inbox)
            view = self.step()
            if leaving:
                self._fail_all("the fleet has ended")
            with self.clock.timed("publish"):
                self.publish(inbox)
            if leaving:
                self.status.phase = "stopped"
                return
            leaving = view.is_stopping
            self._idle(inbox, view)

    def step(self) -> ChainView:
        """One step, whatever there is to do; the fleet as its first exchange showed it."""
        self.status.phase = "schedule"
        with self.clock.timed("schedule"):
            self.scheduler.admit(self._admitted)
            spans = self.scheduler.plan()
            self.dispatcher.begin_step(self._word())
        self.status.phase = "step"
        told = self.runner.step(spans)
        self.status.step += 1
        self._apply(spans, told)
        view = self.dispatcher.chain_view()
        self._num_busy_steps += view.has_work
        return view

    def drain(self, inbox: Inbox) -> None:
        """Take every message that waits; what cannot be read is logged and changes nothing."""
        while (message := inbox.receive()) is not None:
            client, payload = message
            try:
                decoded = decode_to_rank(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("wire: dropped a message of %d bytes that is none of ours: %s", len(payload), error)
                continue
            if isinstance(decoded, Attach):
                self._publisher.attach(client, decoded)
            elif isinstance(decoded, Request):
                self.submit(client, decoded)
            else:
                self.abort(client, decoded.id)

    def submit(self, client: bytes, request: Request) -> None:
        """Queue a request, or answer at once with the typed reason why not."""
        if self.scheduler.find((client, request.id)) is not None:
            log.warning("request %s: its id is in use; the second one is dropped", request.id)
            return
        reason = Draining() if self._is_stopping else self._refusal(request)
        if reason is not None:
            self.outbox.terminal(client, request.id, Rejected(reason))
            return
        named = Sequence(client, request, time.monotonic(), page_tokens=self._named_page_tokens, root=self._root)
        self.scheduler.add(named)

    def abort(self, client: bytes, request_id: str) -> None:
        """Free a request's pages now; one that is over, or was never here, is no error."""
        sequence = self.scheduler.find((client, request_id))
        if sequence is not None:
            if sequence.num_computed and not sequence.num_generated:
                self.runner.clean(sequence)  # no logits have shown yet that its rows are finite
            self.scheduler.remove(sequence)
            self.outbox.terminal(client, request_id, Aborted())

    def publish(self, inbox: Inbox) -> None:
        """Say what the step did.

        Raises:
            EngineError: it was the last of this rank; everybody has been told.
        """
        if is_last := self._num_non_finite >= MAX_NON_FINITE_STEPS:
            self._fail_all(NON_FINITE)
        self.status.phase = "publish"
        self.status.num_running = len(self.scheduler.running)
        self.status.num_waiting = len(self.scheduler.waiting)
        self._publisher.publish(inbox, step=self.status.step, updates=self.outbox.take())
        if is_last:
            raise EngineError(f"rank {self.rank}: {NON_FINITE}")

    def expert_loads(self) -> ExpertLoads:
        """What this rank's routed experts were asked to do since the start."""
        layers = enumerate(layer.ffn for layer in self.runner.decoder.layers)
        return ExpertLoads(
            num_steps=self._num_busy_steps,
            first_expert=self.dispatcher.first_expert,
            layers=[LayerExperts(number, ffn.load.rows, ffn.load.num_seen) for number, ffn in layers
                    if isinstance(ffn, MoELayer)],
        )  # fmt: skip

    def phase_times(self) -> PhaseTimes:
        """Where the loop's time went since the start."""
        seconds = self.clock.seconds
        return PhaseTimes(
            schedule_s=seconds["schedule"],
            forward_s=self.runner.clock.seconds["forward"],
            exchange_s=self.dispatcher.exchange_s,
            sample_s=self.runner.clock.seconds["sample"],
            publish_s=seconds["publish"],
            idle_s=seconds["idle"],
        )

    def load(self) -> Load:
        """This rank's load now."""
        pool = self.scheduler.pool
        return Load(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            used_pages=pool.total_pages - pool.num_free,
            total_pages=pool.total_pages,
        )

    def _word(self) -> int:
        """Stopping only when its work is done or the time to drain is over: until then peers must step along."""
        has_work = self.scheduler.has_work
        is_leaving = self._is_stopping and (not has_work or time.monotonic() >= self._drain_until_s)
        return (HAS_WORK if has_work else 0) | (STOPPING if is_leaving else 0)

    def _fail_all(self, message: str) -> None:
        for sequence in [*self.scheduler.running.values(), *self.scheduler.waiting.values()]:
            self.scheduler.remove(sequence)
            self.outbox.terminal(sequence.client, sequence.request.id, Failed(message))

    def _refusal(self, request: Request) -> RejectReason | None:
        pool = self.scheduler.pool
        return refusal(
            request,
            vocabulary=self._vocabulary,
            max_model_len=self._max_model_len,
            cache_tokens=pool.total_pages * pool.page_tokens,
        )

    def _admitted(self, sequence: Sequence) -> None:
        self.runner.admit(sequence)
        self.outbox.scheduled(sequence, time.monotonic())
        request = sequence.request
        if request.max_tokens == 0 and request.prompt_logprobs is None:
            self._finish(sequence, "length")
            return
        most = min(self._vocabulary.size, sequence.lifetime_tokens)
        sequence.edits = LogitEdits.wanted_by(request.sampling, request.prompt_tokens, most=most)

    def _apply(self, spans: list[Span], all_told: list[Told]) -> None:
        for span in spans:
            assert span.sequence.cache is not None
            span.sequence.cache.commit(span.num_rows)
        for told in all_told:
            if told.bad_position is not None:
                self._fail(told.span.sequence, told.bad_position)
            else:
                self._take(told)
        if all_told:
            is_good = all(told.bad_position is None for told in all_told)
            self._num_non_finite = 0 if is_good else self._num_non_finite + 1

    def _take(self, told: Told) -> None:
        sequence = told.span.sequence
        if told.prompt_logprobs:
            self.outbox.prompt_logprobs(sequence, told.prompt_logprobs)
        if told.token is None:
            return
        names = sequence.proven_names()
        if names is not None and sequence.cache is not None:
            sequence.cache.seal(names)
        if sequence.request.max_tokens == 0:  # the prompt's logprobs were all that was asked for
            self._finish(sequence, "length")
        else:
            self._take_token(sequence, told.token, told.logprob)

    def _take_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        sequence.append(token)
        self.outbox.token(sequence, token, logprob)
        if token in sequence.request.stop_token_ids:
            self._finish(sequence, "stop")
        elif sequence.num_generated >= sequence.request.max_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: Literal["stop", "length"]) -> None:
        self.scheduler.remove(sequence)
        finished = Finished(
            reason=reason,
            prompt_tokens=len(sequence.request.prompt_tokens),
            completion_tokens=sequence.num_generated,
        )
        self.outbox.terminal(sequence.client, sequence.request.id, finished)

    def _fail(self, sequence: Sequence, position: int) -> None:
        self.runner.clean(sequence)
        self.scheduler.remove(sequence)
        message = f"non-finite logits at position {position}"
        log.error("request %s: %s", sequence.request.id, message)
        self.outbox.terminal(sequence.client, sequence.request.id, Failed(message))

    def _idle(self, inbox: Inbox, view: ChainView) -> None:
        """Nobody has work: sleep, bounded, until a message comes or a peer that has work again begins its step."""
        if not view.has_work and not self.scheduler.has_work and self._idle_wait_ms > 0:
            self.status.phase = "idle"
            with self.clock.timed("idle"):
                inbox.wait(self._idle_wait_ms, self.dispatcher.doorbells())
