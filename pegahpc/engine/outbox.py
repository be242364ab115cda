"""What a step has to say, gathered by client: one message each."""

from __future__ import annotations

from pegahpc.engine.sequence import Sequence
from pegahpc.wire.messages import RequestUpdate, Scheduled, Terminal, TokenLogprob


class Outbox:
    """The only way out of the engine. Field order in an update is event order: scheduled, prompt, tokens, terminal."""

    def __init__(self) -> None:
        self._updates: dict[bytes, list[RequestUpdate]] = {}
        self._open: dict[tuple[bytes, str], RequestUpdate] = {}  # those of them that have no terminal yet

    def scheduled(self, sequence: Sequence, now_s: float) -> None:
        """The request left the queue."""
        update = self._of(sequence.client, sequence.request.id)
        update.scheduled = Scheduled(queued_at_s=sequence.queued_at_s, scheduled_at_s=now_s)
        update.cached_tokens = sequence.num_computed

    def prompt_logprobs(self, sequence: Sequence, logprobs: list[TokenLogprob]) -> None:
        """Those of the prompt's next tokens."""
        self._of(sequence.client, sequence.request.id).prompt_logprobs += logprobs

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """One more token, and its logprob where it was asked for."""
        update = self._of(sequence.client, sequence.request.id)
        update.tokens.append(token)
        if logprob is not None:
            update.logprobs.append(logprob)

    def terminal(self, client: bytes, request_id: str, terminal: Terminal) -> None:
        """The request's end; nothing more is said of it."""
        self._of(client, request_id).terminal = terminal
        del self._open[client, request_id]  # the id is free: a request that takes it is another one

    def take(self) -> dict[bytes, list[RequestUpdate]]:
        """Everything since the last call, by client."""
        taken, self._updates, self._open = self._updates, {}, {}
        return taken

    def _of(self, client: bytes, request_id: str) -> RequestUpdate:
        if (client, request_id) not in self._open:
            update = RequestUpdate(id=request_id)  # with lists of its own: msgspec copies an empty default
            self._open[client, request_id] = update
            self._updates.setdefault(client, []).append(update)
        return self._open[client, request_id]
