"""A fleet's ranks as a target, over their own sockets: the gateway's routing without HTTP and text."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

import zmq.asyncio

from pegahpc.bench.answers import Answer, Ask
from pegahpc.bench.endpoint import Unusable
from pegahpc.bench.experts import SETTLE_S, Counts, counts_of
from pegahpc.bench.prompts import Form
from pegahpc.bench.served import KnownFleet
from pegahpc.bench.updates import Asking, Pending
from pegahpc.gateway.router import RouteHint, Router
from pegahpc.page_names import model_salt, page_names, root_name
from pegahpc.wire.messages import Abort, Attach, ExpertLoads, decode_outputs, encode
from pegahpc.wire.sockets import connect_to_rank

ATTACH_TIMEOUT_S = 10.0


class WireTarget:
    """All ranks of a fleet; a request goes where the gateway would send it, by session, cached prefix and load.

    Its checkpoint must be readable: it names the pages of prompts, by which cached prefixes are found.
    """

    form: Form = "tokens"

    def __init__(self, fleet: KnownFleet, *, asking: Asking, stall_s: float) -> None:
        self._endpoints, self._secret = fleet.endpoints, fleet.secret
        self._asking = asking
        self._root = root_name(model_salt(fleet.model_folder))
        self._page_tokens: int = fleet.config["engine"]["page_tokens"]
        self._load_bound: int = fleet.config["gateway"]["affinity_load_bound"]
        self._stall_s = stall_s

    async def __aenter__(self) -> WireTarget:
        self._pending = Pending(self._stall_s)
        self._router = Router(len(self._endpoints), load_bound=self._load_bound)
        self._context = zmq.asyncio.Context()
        self._sockets = [connect_to_rank(self._context, endpoint, self._secret) for endpoint in self._endpoints]
        self._experts: dict[int, ExpertLoads] = {}
        self._answered = [asyncio.Event() for _ in self._endpoints]
        self._readers = [asyncio.create_task(self._read(rank)) for rank in range(len(self._endpoints))]
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                for event in self._answered:
                    await event.wait()
        except TimeoutError:
            await self._close()
            silent = [str(rank) for rank, event in enumerate(self._answered) if not event.is_set()]
            raise Unusable(f"no answer from rank {', '.join(silent)} within {ATTACH_TIMEOUT_S:g} s") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """One request; leaving early aborts it on its rank."""
        request = self._asking.request(ask)
        names = page_names(request.prompt_tokens[:-1], self._page_tokens, self._root)
        hint = RouteHint(names, ask.session)
        rank = self._router.route(hint, live=range(len(self._sockets))).rank
        entry = self._pending.open(request.id, answer)
        self._router.on_sent(rank, request.id, hint)
        try:
            await self._sockets[rank].send(encode(request))
            await self._pending.wait(entry)
        finally:
            self._router.on_closed(rank, request.id)
            if self._pending.close(request.id):
                self._sockets[rank].send(encode(Abort(request.id)))

    async def expert_counts(self) -> Counts | None:
        """As the ranks told them last, when they have told all."""
        await asyncio.sleep(SETTLE_S)
        return counts_of(self._experts.values()) if len(self._experts) == len(self._endpoints) else None

    async def _read(self, rank: int) -> None:
        """Deliver what one rank says, until cancelled; a rank that cannot be understood fails all that is open."""
        try:
            await self._sockets[rank].send(encode(Attach()))
            while True:
                payload = await self._sockets[rank].recv()
                at_s = time.monotonic()
                outputs = decode_outputs(payload)
                self._answered[rank].set()
                self._router.on_report(outputs)
                if outputs.experts is not None:
                    self._experts[rank] = outputs.experts
                self._pending.deliver(outputs.updates, at_s)
        except Exception as error:  # the task's border: whoever waits is told
            self._pending.fail_all(f"rank {rank}: {type(error).__name__}: {error}")

    async def _close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for socket in self._sockets:
            socket.close()
        self._context.term()
