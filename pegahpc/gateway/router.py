"""Which rank gets a request: the one that knows the conversation, else its prefix, else the one with the least work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pegahpc.gateway.prefix_index import PrefixIndex
from pegahpc.gateway.rank_view import RankView
from pegahpc.gateway.sessions import Sessions
from pegahpc.wire.messages import StepOutputs

Reason = Literal["session", "prefix", "load"]


class RouteHint(NamedTuple):
    """What of a request speaks for one rank or another.

    Args:
        page_names: the prompt's full pages that a cache may have, in order (`pegahpc.page_names`).
        session: the client's X-Session-Id; "" for none.
    """

    page_names: Sequence[bytes] = ()
    session: str = ""


class Choice(NamedTuple):
    """A rank, and what decided for it."""

    rank: int
    reason: Reason


def choose(
    loads: Mapping[int, int], prefix_pages: Mapping[int, int], *, session_rank: int | None, load_bound: int
) -> Choice:
    """The policy, in this order, over the live ranks.

    1. The session's rank: it has the conversation, its newest answer included.
    2. The rank with the longest prefix, cached or about to be, of at least one page; of equal ones the least loaded.
    3. The least loaded rank.

    Ties go to the lowest rank. 1 and 2 only see ranks whose load is at most `load_bound` above the least: prefill that
    a hit saves is worth a short queue, not a long one. Without the bound one hot prefix (a system prompt that all
    users share) would hold all traffic on the first rank that cached it, and the others would idle. With it the prefix
    spills over to the next rank, which then has it too.

    Args:
        loads: running + 4 * waiting of each live rank.
        prefix_pages: pages that a rank has, or is about to have, of the prompt's beginning; no entry for none.
        session_rank: None when the request has no session, or a new one.

    Raises:
        ValueError: no rank is live.
    """
    least = min(loads, key=lambda rank: (loads[rank], rank))
    near = loads[least] + load_bound
    if session_rank is not None and loads.get(session_rank, near + 1) <= near:
        return Choice(session_rank, "session")
    cached = [rank for rank in prefix_pages if rank in loads and loads[rank] <= near]
    if cached:
        return Choice(min(cached, key=lambda rank: (-prefix_pages[rank], loads[rank], rank)), "prefix")
    return Choice(least, "load")


class Router:
    """All that is known of the ranks, by what they report, and the choice from it."""

    def __init__(self, num_ranks: int, *, load_bound: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.views = [RankView() for _ in range(num_ranks)]
        self.prefixes = PrefixIndex(num_ranks, clock=clock)
        self._sessions = Sessions()
        self._load_bound = load_bound

    def route(self, hint: RouteHint, *, live: Iterable[int]) -> Choice:
        """Choose one of the `live` ranks (at least one); a session stays where this sends it."""
        choice = choose(
            {rank: self.views[rank].score for rank in live},
            self.prefixes.prefix_pages(hint.page_names),
            session_rank=self._sessions.rank_of(hint.session),
            load_bound=self._load_bound,
        )
        self._sessions.remember(hint.session, choice.rank)
        return choice

    def on_sent(self, rank: int, request_id: str, hint: RouteHint) -> None:
        """A request goes to a rank: the next one with its prefix should know."""
        self.views[rank].on_sent(request_id)
        self.prefixes.await_pages(request_id, rank, hint.page_names)

    def on_closed(self, rank: int, request_id: str) -> None:
        """A request ended, whoever ended it."""
        self.views[rank].on_closed(request_id)
        self.prefixes.settle(request_id)

    def on_report(self, outputs: StepOutputs) -> None:
        """A rank's newest load, and what its cache gained and lost."""
        self.views[outputs.rank].on_report(outputs)
        if outputs.kv_events is not None:
            self.prefixes.apply(outputs.rank, outputs.kv_events)
        for update in outputs.updates:
            if update.tokens or update.terminal is not None:  # its pages are stored by now, or will not be
                self.prefixes.settle(update.id)

    def on_down(self, rank: int) -> None:
        """The connection to a rank is gone, and maybe the rank: what its cache holds is no longer known."""
        self.prefixes.forget(rank)
        self._sessions.forget_rank(rank)
