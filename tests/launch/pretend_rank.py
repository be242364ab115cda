"""A rank program without an engine: it joins, counts steps, leaves when told; `RANK:ACT` makes one rank fail.

Acts: die (before it joins), refuse (a bad checkpoint), raise (while it loads), hang (never ready), quit (leaves at
step 5), stall (stops counting but speaks on), breed (starts a process that outlives it, and does not mind SIGTERM).
"""

import os
import socket
import subprocess
import sys
import time

from pegahpc.launch.identity import ProcessId
from pegahpc.launch.messages import ERROR, REFUSAL, Pulse, RankRecord
from pegahpc.launch.rank_link import RankLink, take_stdin

TIMEOUT_S = 60.0


def main() -> None:
    """Run one pretended rank."""
    link = RankLink(take_stdin())
    rank = link.boot.context.rank
    acts = dict(argument.split(":") for argument in sys.argv[1:])
    act = acts.get(str(rank), "")
    if act == "die":
        os._exit(7)
    if act == "breed":
        subprocess.Popen([sys.executable, "-c", "import signal; signal.sigwait([signal.SIGTERM]); signal.pause()"])
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    link.join(RankRecord(rank=rank, wire_endpoint=endpoint, device="cpu", process=ProcessId.own()))
    link.wait_for_world(TIMEOUT_S)
    load(link, act)
    count(link, act)


def load(link: RankLink, act: str) -> None:
    """Pretend to load."""
    link.report("load", 0.5)
    if act in ("refuse", "raise"):
        reason, weight = ("model.path: tensor 'x' is missing", REFUSAL) if act == "refuse" else ("boom", ERROR)
        link.complain(reason, weight)
        sys.exit(1)
    if act == "hang":
        time.sleep(TIMEOUT_S)
    link.report("ready", 1.0)


def count(link: RankLink, act: str) -> None:
    """Pretend to step."""
    step, rank = 0, link.boot.context.rank
    waiting_for = "" if act == "stall" or not any(word.endswith(":stall") for word in sys.argv) else "the stalled rank"
    link.publish(lambda: Pulse(rank=rank, step=step, phase="step", waiting_for=waiting_for))
    link.wait_to_go(TIMEOUT_S)
    while not link.is_stopping():
        time.sleep(0.01)
        step += 1
        if act == "quit" and step == 5:
            sys.exit(0)
        if step > 20 and any(word.endswith(":stall") for word in sys.argv):
            step -= 1


if __name__ == "__main__":
    main()
