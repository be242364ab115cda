"""Who is to blame when a fleet stands still."""

import asyncio

from pegahpc.launch.losses import Losses
from pegahpc.launch.messages import CONSEQUENCE, DEATH, ERROR, TRAY_GONE, Loss, Pulse
from pegahpc.launch.watchdog import Watchdog


def watched(pulses: list[list[Pulse]], bound_s: float = 5.0) -> Watchdog:
    """A watchdog that heard each list of pulses one second after the one before, from 0 on."""
    watchdog = Watchdog(bound_s)
    for second, heard in enumerate(pulses):
        for pulse in heard:
            watchdog.note(pulse, float(second))
    return watchdog


def test_ranks_that_step_are_well() -> None:
    watchdog = watched([[Pulse(rank=0, step=s), Pulse(rank=1, step=s)] for s in range(20)])
    assert watchdog.verdict(19.5) is None


def test_nothing_is_said_of_a_fleet_that_has_not_spoken() -> None:
    assert Watchdog(1.0).verdict(100.0) is None


def test_of_silent_ranks_the_one_that_fell_silent_first_is_named() -> None:
    both = [[Pulse(rank=0, step=s, phase="step"), Pulse(rank=1, step=s)] for s in range(2)]
    watchdog = watched([*both, [Pulse(rank=1, step=2)]])
    assert watchdog.verdict(5.9) is None
    verdict = watchdog.verdict(9.0)
    assert verdict == (0, "has been silent for 8.0 s (step 1, exchange 0, phase step)")


def test_a_pulse_that_the_tray_repeats_grows_old() -> None:
    watchdog = Watchdog(5.0)
    for second in range(8):
        watchdog.note(Pulse(rank=0, step=second, age_s=0.0), float(second))
        watchdog.note(Pulse(rank=1, step=1, age_s=float(second)), float(second))
    verdict = watchdog.verdict(7.0)
    assert verdict is not None and verdict[0] == 1 and "silent for 7.0 s" in verdict[1]


def test_of_ranks_that_stand_still_the_one_that_waits_for_nobody_is_named() -> None:
    still = [
        Pulse(rank=0, step=4, exchange=9, waiting_for="rank 2"),
        Pulse(rank=1, step=4, exchange=9, waiting_for="rank 2"),
        Pulse(rank=2, step=4, exchange=8, phase="attention"),
    ]
    verdict = watched([still] * 8).verdict(7.5)
    assert verdict == (2, "has not moved for 7.5 s (step 4, exchange 8, phase attention)")


def test_the_culprit_is_named_though_those_that_wait_for_it_stopped_first() -> None:
    watchdog = Watchdog(5.0)
    for second in range(8):
        watchdog.note(Pulse(rank=0, step=4, waiting_for="rank 1"), float(second))
        watchdog.note(Pulse(rank=1, step=4 + (second > 0)), float(second))
    verdict = watchdog.verdict(5.5)
    assert verdict is not None and verdict[0] == 1


def test_a_tray_that_is_silent_is_told_from_its_ranks() -> None:
    watchdog = Watchdog(5.0)
    for second in range(8):
        watchdog.note_tray(0, float(second))
    watchdog.note_tray(1, 1.0)
    assert watchdog.silent_tray(5.9) is None
    assert watchdog.silent_tray(7.0) == (1, "has been silent for 6.0 s")


def test_who_has_never_spoken_is_found_once_all_are_expected_to() -> None:
    watchdog = Watchdog(5.0)
    for tray in (0, 1):
        watchdog.expect_tray(tray, 100.0)
    watchdog.note(Pulse(rank=0, step=3), 99.9)
    watchdog.expect_ranks(2, 100.0)
    assert watchdog.verdict(104.0) is None and watchdog.silent_tray(104.0) is None
    for second in range(101, 110):
        watchdog.note(Pulse(rank=0, step=second), float(second))
        watchdog.note_tray(0, float(second))
    assert watchdog.silent_tray(109.0) == (1, "has been silent for 9.0 s")
    watchdog.note_tray(1, 109.0)
    verdict = watchdog.verdict(109.0)
    assert verdict is not None and verdict[0] == 1


def test_who_fell_silent_while_others_still_started_is_not_given_the_whole_bound_again() -> None:
    watchdog = Watchdog(5.0)
    for tray in (0, 1):
        watchdog.note_tray(tray, 1.0)
        watchdog.expect_tray(tray, 5.0)
    assert watchdog.silent_tray(5.9) is None
    assert watchdog.silent_tray(6.1) == (0, "has been silent for 5.1 s")
    for tray in (0, 1):
        watchdog.note_tray(tray, 6.0)
    for rank in (0, 1):
        watchdog.note(Pulse(rank=rank, age_s=0.5), 1.5)
    watchdog.note(Pulse(rank=1), 5.0)
    watchdog.expect_ranks(2, 5.0)
    assert watchdog.verdict(5.9) is None
    verdict = watchdog.verdict(6.1)
    assert verdict is not None and verdict[0] == 0 and "silent for 5.1 s" in verdict[1]


def test_a_rank_that_waited_for_the_others_has_the_whole_bound_to_move() -> None:
    watchdog = watched([[Pulse(rank=0, step=0)]] * 21)
    watchdog.expect_ranks(1, 20.0)
    watchdog.note(Pulse(rank=0, step=0), 24.9)
    assert watchdog.verdict(24.9) is None
    watchdog.note(Pulse(rank=0, step=0), 25.1)
    verdict = watchdog.verdict(25.1)
    assert verdict is not None and "has not moved for 5.1 s" in verdict[1]


def test_a_rank_of_a_tray_that_is_quiet_is_not_judged_a_moment_before_the_tray() -> None:
    watchdog = Watchdog(5.0)
    for tray in (0, 1):
        watchdog.expect_tray(tray, 0.0)
    watchdog.expect_ranks(4, 0.0)
    for second in range(20):
        for rank in (0, 1):
            watchdog.note(Pulse(rank=rank, step=second), float(second))
        watchdog.note_tray(0, float(second))
    for rank in (2, 3):
        watchdog.note(Pulse(rank=rank, step=1, age_s=0.4), 10.0)  # the last words of tray 1
    watchdog.note_tray(1, 10.0)
    assert watchdog.silent_tray(14.9) is None and watchdog.verdict(14.9) is None
    assert watchdog.silent_tray(15.2) == (1, "has been silent for 5.2 s")


def test_exchanges_within_one_long_step_are_progress() -> None:
    watchdog = watched([[Pulse(rank=0, step=1, exchange=s)] for s in range(20)])
    assert watchdog.verdict(19.5) is None


async def test_a_death_outweighs_the_errors_that_it_caused_though_they_come_first() -> None:
    losses = Losses()
    for rank, weight in ((0, ERROR), (1, CONSEQUENCE), (2, DEATH), (3, DEATH)):
        losses.add(Loss(rank=rank, reason="", weight=weight))
    assert (await losses.culprit()).rank == 2


async def test_a_heavier_loss_within_the_grace_is_waited_for() -> None:
    losses = Losses()
    losses.add(Loss(rank=0, reason="", weight=ERROR))
    waiting = asyncio.create_task(losses.culprit())
    await asyncio.sleep(0.05)
    losses.add(Loss(reason="tray 1", weight=TRAY_GONE))
    assert (await waiting).reason == "tray 1"
