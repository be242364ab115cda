"""The loop over an in-memory wire: what comes in, what goes out, and when."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from engines import GREEDY, build, request
from inboxes import MemoryInbox, turn, turns
from oracles import save_tiny

from pegahpc.engine import loop, publisher
from pegahpc.engine.loop import Engine
from pegahpc.moe.dispatch import STOPPING, ChainView
from pegahpc.wire.messages import (
    HEARTBEAT_S,
    Abort,
    Aborted,
    Attach,
    BadRequest,
    CacheBudget,
    ContextLength,
    Draining,
    Failed,
    Finished,
    Rejected,
    Sampling,
)

US, THEM = b"us", b"them"
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return build(folder, "engine.max_num_seqs=4", "engine.cache_tokens=512", "engine.max_prefill_rows=16")


@pytest.fixture
def inbox() -> MemoryInbox:
    return MemoryInbox()


class Clock:
    """time.monotonic that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(publisher, "time", clock)
    return clock


def test_a_request_is_scheduled_generates_and_ends(engine: Engine, inbox: MemoryInbox, clock: Clock) -> None:
    inbox.put(US, request("a", PROMPT, 3))
    turns(engine, inbox)
    first, *later = inbox.updates(US)
    assert first.scheduled is not None and first.scheduled.queued_at_s == first.scheduled.scheduled_at_s == 1000.0
    assert len(first.tokens) == 1 and first.terminal is None
    assert [(u.scheduled, len(u.tokens)) for u in later] == [(None, 1), (None, 1)]
    assert inbox.terminals(US, "a") == [Finished(reason="length", prompt_tokens=5, completion_tokens=3)]


def test_a_step_sends_one_message_to_each_client_with_updates(engine: Engine, inbox: MemoryInbox, clock: Clock) -> None:
    inbox.put(US, Attach())
    inbox.put(THEM, Attach())
    turn(engine, inbox)
    inbox.sent.clear()
    inbox.put(US, request("a", PROMPT, 4), request("b", PROMPT, 4))
    inbox.put(THEM, request("c", PROMPT, 2))
    for expected in ([US, THEM], [US, THEM], [US], [US], []):
        step = engine.status.step
        turn(engine, inbox)
        assert [client for client, _ in inbox.sent] == expected
        assert all(outputs.step == step + 1 and outputs.rank == 0 for _, outputs in inbox.sent)
        assert all({u.id for u in outputs.updates} == ({"a", "b"} if to == US else {"c"}) for to, outputs in inbox.sent)
        inbox.sent.clear()


def test_an_attach_is_answered_at_once_and_then_every_heartbeat(
    engine: Engine, inbox: MemoryInbox, clock: Clock
) -> None:
    turn(engine, inbox)
    assert inbox.sent == [], "nobody is attached"
    clock.now_s += 0.01
    inbox.put(US, Attach())
    for seconds, expected in ((0, 1), (HEARTBEAT_S / 2, 1), (HEARTBEAT_S / 2, 2), (0, 2), (HEARTBEAT_S, 3)):
        clock.now_s += seconds
        turn(engine, inbox)
        assert len(inbox.sent) == expected
    pulses = [outputs.step for _, outputs in inbox.sent]
    assert pulses == sorted(set(pulses)) and inbox.updates(US) == []
    inbox.put(THEM, Attach())
    turn(engine, inbox)
    assert [client for client, _ in inbox.sent][3:].count(THEM) == 1


def test_an_attach_of_another_version_is_ignored_and_logged(
    engine: Engine, inbox: MemoryInbox, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    inbox.put(US, Attach(version=99))
    turn(engine, inbox)
    assert inbox.sent == [] and "a client speaks version 99" in caplog.text


def test_a_client_that_is_gone_is_forgotten_until_it_attaches_again(
    engine: Engine, inbox: MemoryInbox, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: set[bytes] = set()
    tried: list[bytes] = []
    send = inbox.send

    def send_if_there(client: bytes, payload: bytes) -> None:
        tried.append(client)
        if client in gone:
            raise ConnectionError("the client is gone")
        send(client, payload)

    monkeypatch.setattr(inbox, "send", send_if_there)

    def beat() -> list[bytes]:
        tried.clear()
        clock.now_s += HEARTBEAT_S
        turn(engine, inbox)
        return sorted(tried)

    inbox.put(US, Attach())
    inbox.put(THEM, Attach())
    assert beat() == [THEM, US]
    gone.add(THEM)
    assert beat() == [THEM, US], "once more, to find out"
    assert beat() == [US]
    gone.clear()
    inbox.put(THEM, Attach())
    assert beat() == [THEM, US]


NESTED = b"\x82\xa4type\xa7request\xa1x" + b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x00", b"GET / HTTP/1.1", b"\x91" * 50, NESTED, b"\x81\xa4type\xa7request",
     b"\x82\xa4type\xa5abort\xa2id\xa2\xff\xfe", b"\x82\xa4type\xa5abort\xa2id\x07", b"\x81\xa4type\xa5pizza"],
    ids=["empty", "reserved", "a number", "text", "lists", "nested", "fields missing", "no utf-8", "wrong type",
         "unknown type"],
)  # fmt: skip
def test_a_message_that_is_none_of_ours_is_dropped_and_logged(
    engine: Engine, inbox: MemoryInbox, caplog: pytest.LogCaptureFixture, payload: bytes
) -> None:
    inbox.put(US, payload, request("a", PROMPT, 1))
    with caplog.at_level(logging.WARNING):
        turns(engine, inbox)
    assert f"dropped a message of {len(payload)} bytes" in caplog.text
    assert len(inbox.terminals(US, "a")) == 1, "the next one is served"


def test_an_id_in_use_is_dropped_and_logged(
    engine: Engine, inbox: MemoryInbox, caplog: pytest.LogCaptureFixture
) -> None:
    inbox.put(US, request("a", PROMPT, 3), request("a", [9, 9], 7))
    turns(engine, inbox)
    assert "request a: its id is in use" in caplog.text
    assert inbox.terminals(US, "a") == [Finished(reason="length", prompt_tokens=5, completion_tokens=3)]


def test_an_id_whose_request_is_over_may_be_used_again_in_the_same_step(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("a", [], 3), request("a", [], 4), request("a", PROMPT, 1))
    turns(engine, inbox)
    assert [type(terminal) for terminal in inbox.terminals(US, "a")] == [Rejected, Rejected, Finished]
    assert [(u.scheduled is None, len(u.tokens)) for u in inbox.updates(US)] == [(True, 0), (True, 0), (False, 1)]
    inbox.sent.clear()
    inbox.put(US, request("b", PROMPT, 9))
    turn(engine, inbox)
    inbox.put(US, Abort("b"), request("b", PROMPT, 2))
    turns(engine, inbox)
    assert [type(terminal) for terminal in inbox.terminals(US, "b")] == [Aborted, Finished]


def test_two_clients_with_one_id_do_not_meet(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("a", PROMPT, 6))
    inbox.put(THEM, request("a", [50, 60], 9))
    turn(engine, inbox)
    inbox.put(THEM, Abort("a"))
    turns(engine, inbox)
    assert inbox.terminals(US, "a") == [Finished(reason="length", prompt_tokens=5, completion_tokens=6)]
    assert inbox.terminals(THEM, "a") == [Aborted()]


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_an_abort_frees_its_pages_within_one_step(engine: Engine, inbox: MemoryInbox, rounds: int) -> None:
    """While it waits, in the middle of its prompt, and while it decodes."""
    inbox.put(US, request("a", list(range(40)), 100))
    for _ in range(rounds):
        turn(engine, inbox)
    assert rounds == 0 or engine.load().used_pages == 9  # ceil(140 / 16)
    inbox.put(US, Abort("a"))
    turn(engine, inbox)
    assert engine.load().used_pages == 0 and not engine.scheduler.has_work
    assert inbox.terminals(US, "a") == [Aborted()]
    assert inbox.loads(US)[-1].used_pages == 0


def test_an_abort_of_what_is_not_here_says_nothing(engine: Engine, inbox: MemoryInbox, clock: Clock) -> None:
    turn(engine, inbox)
    inbox.put(US, Abort("never"), request("a", PROMPT, 1))
    turns(engine, inbox)
    inbox.put(US, Abort("a"))
    inbox.put(THEM, Abort("a"))
    turn(engine, inbox)
    assert [update.id for update in inbox.updates(US)] == ["a"] and inbox.updates(THEM) == []


def test_no_tokens_asked_for_is_finished_at_once(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("a", PROMPT, 0))
    turn(engine, inbox)
    (update,) = inbox.updates(US)
    assert update.scheduled is not None and update.tokens == []
    assert update.terminal == Finished(reason="length", prompt_tokens=5, completion_tokens=0)
    assert engine.load().used_pages == 0


def test_a_stop_token_ends_a_request_and_is_counted(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("free", PROMPT, 8))
    turns(engine, inbox)
    free = inbox.tokens(US, "free")
    stop = free[2]
    assert stop not in free[:2], "a prompt that this test cannot judge"
    inbox.put(US, request("a", PROMPT, 8, stop=(999, stop)))
    turns(engine, inbox)
    assert inbox.tokens(US, "a") == free[:3]
    assert inbox.terminals(US, "a") == [Finished(reason="stop", prompt_tokens=5, completion_tokens=3)]


def test_a_stop_token_on_the_last_place_is_a_stop(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("free", PROMPT, 1))
    turns(engine, inbox)
    inbox.put(US, request("a", PROMPT, 1, stop=tuple(inbox.tokens(US, "free"))))
    turns(engine, inbox)
    assert inbox.terminals(US, "a") == [Finished(reason="stop", prompt_tokens=5, completion_tokens=1)]


def test_what_can_never_run_is_rejected_with_its_reason(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(
        US,
        request("empty", [], 3),
        request("vocabulary", [320], 3),
        request("context", PROMPT, 508),
        request("hot", PROMPT, 3, Sampling(temperature=-1.0)),
    )
    turn(engine, inbox)
    reasons = {
        update.id: update.terminal.reason for update in inbox.updates(US) if isinstance(update.terminal, Rejected)
    }
    assert reasons == {
        "empty": BadRequest(param="prompt_tokens", message="the prompt is empty"),
        "vocabulary": BadRequest(param="prompt_tokens", message="token 320 is outside the vocabulary of 320"),
        "context": ContextLength(prompt_tokens=5, max_tokens=508, limit=512),
        "hot": BadRequest(param="temperature", message="-1.0 must be finite and not negative"),
    }
    assert not engine.scheduler.has_work


def test_what_the_cache_can_never_hold_is_rejected_and_what_just_fits_runs(folder: Path, inbox: MemoryInbox) -> None:
    engine = build(folder, "engine.cache_tokens=64")
    inbox.put(US, request("over", PROMPT, 60), request("fits", PROMPT, 59))
    turns(engine, inbox)
    assert inbox.terminals(US, "over") == [Rejected(CacheBudget(tokens=65, limit=64))]
    assert inbox.terminals(US, "fits") == [Finished(reason="length", prompt_tokens=5, completion_tokens=59)]


def test_a_step_without_a_request_runs_and_counts(engine: Engine, inbox: MemoryInbox) -> None:
    before = engine.status.step
    for _ in range(3):
        assert engine.step() == ChainView(has_work=False, is_stopping=False)
    assert engine.status.step == before + 3 and engine.outbox.take() == {}


def test_more_requests_than_slots_wait_and_are_all_served(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, *(request(str(n), PROMPT, 2 + n % 3) for n in range(11)))
    turn(engine, inbox)
    assert (engine.load().num_running, engine.load().num_waiting) == (4, 7)
    turns(engine, inbox)
    assert [len(inbox.terminals(US, str(n))) for n in range(11)] == [1] * 11
    assert engine.load().used_pages == 0


def run(engine: Engine, inbox: MemoryInbox, stop_after: int) -> None:
    """`Engine.run`, asked to stop when the loop has looked that many times."""
    looks = iter(range(10_000))
    engine.run(inbox, lambda: next(looks) >= stop_after)


def test_an_idle_rank_waits_and_leaves_after_the_agreed_step(engine: Engine, inbox: MemoryInbox) -> None:
    before = engine.status.step
    run(engine, inbox, stop_after=3)
    # Three idle rounds; the fourth step says that it wants to leave; all leave after the fifth.
    assert engine.status.step == before + 5
    assert inbox.waits_ms == [100.0] * 4
    assert engine.status.phase == "stopped"


def test_a_rank_with_work_does_not_wait(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("a", PROMPT, 6))
    run(engine, inbox, stop_after=6)
    assert inbox.terminals(US, "a") == [Finished(reason="length", prompt_tokens=5, completion_tokens=6)]
    assert len(inbox.waits_ms) == 1, "after the sixth step there is nothing left, and one round to leave"


def test_a_rank_whose_peers_have_work_does_not_wait(
    engine: Engine, inbox: MemoryInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = iter([ChainView(True, False), ChainView(True, False), ChainView(False, False), ChainView(True, True)])
    monkeypatch.setattr(engine.dispatcher, "chain_view", lambda: next(views, ChainView(False, True)))
    run(engine, inbox, stop_after=99)
    assert len(inbox.waits_ms) == 1


def test_no_wait_at_all_where_the_wait_is_zero(folder: Path, inbox: MemoryInbox) -> None:
    engine = build(folder, "engine.idle_wait_ms=0")
    run(engine, inbox, stop_after=3)
    assert inbox.waits_ms == []


def test_a_draining_rank_refuses_new_work_and_finishes_what_runs(engine: Engine, inbox: MemoryInbox) -> None:
    inbox.put(US, request("old", PROMPT, 7))
    before = engine.status.step

    def is_stopping() -> bool:
        if engine.status.step - before == 2:
            inbox.put(US, request("new", PROMPT, 7))
        return engine.status.step - before >= 2

    engine.run(inbox, is_stopping)
    assert inbox.terminals(US, "old") == [Finished(reason="length", prompt_tokens=5, completion_tokens=7)]
    assert inbox.terminals(US, "new") == [Rejected(Draining())]
    assert engine.status.step == before + 7 + 2, "seven of work, one that says so, one to leave"


def test_what_is_left_at_the_drain_bound_fails(engine: Engine, inbox: MemoryInbox, clock: Clock) -> None:
    inbox.put(US, *(request(str(n), PROMPT, 400) for n in range(3)))
    before, words = engine.status.step, []
    begin_step = engine.dispatcher.begin_step

    def tick(word: int) -> None:
        words.append(word)
        clock.now_s += 10.0
        begin_step(word)

    engine.dispatcher.begin_step = tick  # type: ignore[method-assign]
    run(engine, inbox, stop_after=2)
    # 30 s of draining from the third round on: its step and two more end within, the sixth step wants to leave.
    assert [bool(word & STOPPING) for word in words] == [False] * 5 + [True] * 2
    assert engine.status.step == before + 7
    for n in range(3):
        assert inbox.terminals(US, str(n)) == [Failed("the fleet has ended")]
    assert engine.load().used_pages == 0 and not engine.scheduler.has_work


def test_a_seeded_request_says_the_same_alone_and_under_load(engine: Engine, inbox: MemoryInbox) -> None:
    seeded = [
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=1.4, top_p=0.9, seed=8),
        Sampling(top_k=20, seed=9),
    ]
    for number, sampling in enumerate(seeded):
        inbox.put(US, request(f"alone {number}", PROMPT, 12, sampling))
        turns(engine, inbox)
    alone = [inbox.tokens(US, f"alone {number}") for number in range(3)]
    assert len({tuple(tokens) for tokens in alone}) == 3
    inbox.put(US, request("noise", list(range(30, 70)), 30, Sampling(seed=1)))
    turn(engine, inbox)
    inbox.put(THEM, *(request(str(number), PROMPT, 12, sampling) for number, sampling in enumerate(seeded)))
    inbox.put(THEM, *(request(f"more {number}", [9] * (1 + 7 * number), 5, GREEDY) for number in range(5)))
    turns(engine, inbox)
    assert [inbox.tokens(THEM, str(number)) for number in range(3)] == alone
