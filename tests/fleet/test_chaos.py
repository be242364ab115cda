"""Each kind of process is killed or frozen at random moments, under load: named, gone in time, the name free at once.

`pytest tests/fleet/test_chaos.py --chaos-rounds 50` is the long form; a round's number is its seed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.fleet.clients import Clients, Outcome
from tests.fleet.live_fleet import ANSWER, LiveFleet
from tests.launch.running_fleet import until

pytestmark = pytest.mark.slow

BOUND_S = 10.0  # from the signal until nothing is left
KINDS = ("rank", "gateway", "launcher", "tray 1", "tray 0")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
TWO_TRAYS = ("topology=ep2", "topology.num_trays=2", "topology.ranks_per_tray=1")
COMPILERS = ("cc", "gcc", "clang")
WORDS = {  # what is said of each kind
    ("rank", signal.SIGKILL): "was killed by SIGKILL (out of memory?)",
    ("rank", signal.SIGSTOP): "has been silent for",
    ("tray 1", signal.SIGSTOP): "has been silent for",
    ("launcher", signal.SIGKILL): "is gone",
}


class Round(NamedTuple):
    """What happens in one round."""

    kind: str
    signum: signal.Signals
    is_starting: bool  # else under load
    topology: tuple[str, ...]


def plan_of(number: int) -> Round:
    """Ten rounds have every kind and signal once; five have every kind."""
    draw = random.Random(number)
    kind, signum = KINDS[number % 5], SIGNALS[number % 2]
    is_starting = kind in ("rank", "tray 1", "tray 0") and draw.random() < 0.3
    return Round(kind, signum, is_starting, draw.choice([TWO_TRAYS, ("topology=ep4",)]))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all rounds: each starts a fleet of the name that the round before has left."""
    return tmp_path_factory.mktemp("chaos")


def test_whatever_fails_whenever_is_named_and_leaves_nothing(home: Path, chaos_round: int) -> None:
    draw, plan = random.Random(1000 + chaos_round), plan_of(chaos_round)
    fleet = LiveFleet(home, *plan.topology)
    try:
        if plan.is_starting:
            until(lambda: bool(fleet.record().rendezvous) and plan.kind in {*fleet.who(), "rank"})
            time.sleep(draw.uniform(0, 3))
            strike(fleet, plan, draw)
            return
        fleet.when_ready()
        assert fleet.answers() == ANSWER
        with Clients(*fleet.address(), num_clients=6, seed=chaos_round) as clients:
            until(lambda: any(outcome.ending == "done" for outcome in clients.outcomes))
            time.sleep(draw.uniform(0, 1.5))
            struck_s = strike(fleet, plan, draw)
        check(clients.outcomes, plan, struck_s)
    finally:
        fleet.end()


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C compiler")
def test_a_fleet_that_fails_while_its_kernels_are_compiled_leaves_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler is nobody's rank: it knows nothing of the fleet, and must not hide that its rank is gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fleet = LiveFleet(tmp_path, *TWO_TRAYS)
    try:
        until(lambda: compiles(fleet), within_s=60)
        strike(fleet, Round("rank", signal.SIGKILL, True, TWO_TRAYS), random.Random(0))
        assert list((tmp_path / "cache" / "pegahpc").iterdir()) == []
    finally:
        fleet.end()


def compiles(fleet: LiveFleet) -> bool:
    names = []
    for process in fleet.processes():
        with suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return not set(names).isdisjoint(COMPILERS)


def strike(fleet: LiveFleet, plan: Round, draw: random.Random) -> float:
    """Send the signal, see the end; the time of the signal."""
    who = {name: pid for name, pid in fleet.who().items() if name.startswith(plan.kind)}
    name, pid = draw.choice(sorted(who.items()))
    record, struck_s = fleet.record(), time.monotonic()
    os.kill(pid, plan.signum)
    fleet.assert_gone(record.ports(), struck_s + BOUND_S)
    after = fleet.record()
    took_s = time.monotonic() - struck_s
    print(f"{plan.signum.name} {name}{' while it starts' if plan.is_starting else ''}: {took_s:.1f} s: {after.reason}")
    assert after.state == "failed"
    assert after.reason.startswith(f"{name} (") and f"pid {pid}" in after.reason
    default = "was killed by SIGKILL" if plan.signum == signal.SIGKILL else "is frozen"
    said = WORDS.get((plan.kind, plan.signum), default)
    assert said in after.reason or (plan.is_starting and "is frozen" in after.reason)
    return struck_s


def check(outcomes: list[Outcome], plan: Round, struck_s: float) -> None:
    """While the gateway lives, nobody who asked before the signal is left without an end in words."""
    assert all(outcome.ending == "done" for outcome in outcomes if outcome.ended_s < struck_s), outcomes
    if plan.kind in ("rank", "tray 1"):
        assert not [outcome for outcome in outcomes if outcome.ending == "broken" and outcome.began_s < struck_s]
        assert [outcome for outcome in outcomes if outcome.ending == "told"]
