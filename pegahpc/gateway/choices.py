"""The sequences of one generation while they are made: sent to ranks, fed as updates come, ended one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pegahpc.gateway.engines import Engines
from pegahpc.gateway.model import ServedModel
from pegahpc.gateway.openai import Generation
from pegahpc.gateway.output import Output
from pegahpc.gateway.planned import Planned
from pegahpc.gateway.router import RouteHint
from pegahpc.gateway.streams import Mailbox, Stream


class Choices:
    """All of them, by their place in the generation. Leaving the context aborts what has not ended.

    Of a prompt's candidates the first is sent ahead, if it has pages to share: with its first token they are in its
    rank's cache, where the others find them. So a prompt is computed once.

    Raises:
        ApiError: on entering, 503 when no rank makes progress.
    """

    def __init__(
        self,
        engines: Engines,
        generation: Generation,
        planned: Sequence[Planned],
        model: ServedModel,
        *,
        session: str,
        arrived_s: float,
    ) -> None:
        self.outputs = [Output(generation, each, model.codec.detokenizer) for each in planned]
        self._engines = engines
        self._planned = planned
        self._session = session
        self._arrived_s = arrived_s
        self._num_candidates = generation.num_candidates
        self._wakes_each_step = generation.is_streamed or bool(generation.stop)
        self._held_back = _followers(planned, self._num_candidates) if self._num_candidates > 1 else {}
        self._num_over = 0
        wakes = self._wakes_each_step or bool(self._held_back)
        self._mailbox = Mailbox(len(planned), wakes_each_step=wakes)
        self._streams: dict[int, Stream] = {}  # those that are open

    @property
    def are_over(self) -> bool:
        """Whether every one has its end."""
        return self._num_over == len(self.outputs)

    def __enter__(self) -> Choices:
        held_back = {idx for followers in self._held_back.values() for idx in followers}
        try:
            for idx in range(len(self.outputs)):
                if idx not in held_back:
                    self._open(idx)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for idx in list(self._streams):
            self._close(idx)

    async def take(self) -> list[tuple[int, str]]:
        """The places of those that have something new, and the text to show for it.

        Raises:
            ApiError: one of them failed.
        """
        news = []
        for stream in await self._mailbox.take():
            idx, output = stream.index, self.outputs[stream.index]
            news.append((idx, output.feed(stream.take())))
            if output.failure is not None:
                raise output.failure
            if self._held_back and idx in self._held_back and (output.num_tokens or output.is_over):
                self._open_followers(idx)
            if output.finish_reason is not None:
                self._num_over += 1
                self._close(idx)
        return news

    def _open(self, idx: int) -> None:
        request, prompt = self._planned[idx]
        hint = RouteHint(prompt.page_names, self._session)
        self._streams[idx] = self._engines.open(
            request, hint=hint, arrived_s=self._arrived_s, mailbox=self._mailbox, index=idx
        )

    def _close(self, idx: int) -> None:
        stream = self._streams.pop(idx)
        stream.times.on_end(self.outputs[idx].outcome, time.monotonic())
        self._engines.close(stream)

    def _open_followers(self, first: int) -> None:
        for idx in self._held_back.pop(first):
            self._open(idx)
        self._mailbox.wakes_each_step = self._wakes_each_step or bool(self._held_back)


def _followers(planned: Sequence[Planned], num_candidates: int) -> dict[int, list[int]]:
    """The first of each prompt's candidates, with the others that wait for it.

    Not where nothing is shared: without a full page, and where the prompt's logprobs need all of it computed.
    """
    return {
        first: list(range(first + 1, first + num_candidates))
        for first in range(0, len(planned), num_candidates)
        if planned[first].prompt.is_shared and planned[first].request.prompt_logprobs is None
    }
