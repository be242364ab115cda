"""Which rank a conversation was last sent to: bounded, the one that was silent for longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

MAX_SESSIONS = 65_536  # about 10 MB


class Sessions:
    """Session ids, whatever clients call them, to ranks. "" is no session."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._ranks: OrderedDict[bytes, int] = OrderedDict()

    def rank_of(self, session: str) -> int | None:
        """The rank of the session's last request; None when it is not known."""
        return self._ranks.get(_key(session)) if session else None

    def remember(self, session: str, rank: int) -> None:
        """The session's newest request goes to `rank`."""
        if not session:
            return
        key = _key(session)
        self._ranks[key] = rank
        self._ranks.move_to_end(key)
        if len(self._ranks) > self._max_sessions:
            self._ranks.popitem(last=False)

    def forget_rank(self, rank: int) -> None:
        """The rank is down: its sessions are as good as new."""
        for key in [key for key, owner in self._ranks.items() if owner == rank]:
            del self._ranks[key]


def _key(session: str) -> bytes:
    """Of one size: a client's header may be kilobytes long."""
    return blake2b(session.encode("utf-8", "surrogateescape"), digest_size=16).digest()
