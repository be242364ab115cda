"""One rank's work as a router sees it: what it reported, and what it cannot have reported yet."""

from __future__ import annotations

from pegahpc.wire.messages import Load, StepOutputs

WAITING_WEIGHT = 4  # a queued request costs a prefill, a running one a row
NUM_REPORTS_BEHIND = 2  # the first report after a send may have been on its way already; the second knows of it


class RankView:
    """What the gateway knows of one rank's work."""

    def __init__(self) -> None:
        self.load = Load(num_running=0, num_waiting=0, used_pages=0, total_pages=0)
        self._num_reports = 0
        self._sent: dict[str, int] = {}  # request id -> the report from which on the load includes it

    @property
    def score(self) -> int:
        """running + 4 * waiting, with what was just sent counted as waiting."""
        return self.load.num_running + WAITING_WEIGHT * (self.load.num_waiting + len(self._sent))

    def on_sent(self, request_id: str) -> None:
        """A request goes out."""
        self._sent[request_id] = self._num_reports + NUM_REPORTS_BEHIND

    def on_closed(self, request_id: str) -> None:
        """A request ended, whoever ended it."""
        self._sent.pop(request_id, None)

    def on_report(self, outputs: StepOutputs) -> None:
        """The rank's newest load."""
        self.load = outputs.load
        self._num_reports += 1
        for update in outputs.updates if self._sent else ():
            self._sent.pop(update.id, None)
        for request_id in [sent for sent, known_from in self._sent.items() if known_from <= self._num_reports]:
            del self._sent[request_id]
