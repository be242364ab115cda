"""Shares of a rank's time, by numbers worked out by hand."""

from pegahpc.launch.phase_window import PhaseWindow, shares
from pegahpc.wire.messages import PhaseTimes


def test_exchange_counts_once_and_the_shares_are_a_whole() -> None:
    times = PhaseTimes(schedule_s=1, forward_s=6, exchange_s=2, sample_s=1, publish_s=1, idle_s=1)
    assert shares(times) == {
        "schedule": 0.1, "forward": 0.4, "exchange": 0.2, "sample": 0.1, "publish": 0.1, "idle": 0.1,
    }  # fmt: skip


def test_a_rank_that_has_not_stepped_has_no_shares() -> None:
    assert set(shares(PhaseTimes()).values()) == {0.0}


def test_a_step_under_way_takes_nothing_below_zero() -> None:
    assert shares(PhaseTimes(forward_s=1, exchange_s=3)) | {"exchange": 0} == dict.fromkeys(shares(PhaseTimes()), 0.0)


def test_only_what_was_added_within_the_window_counts() -> None:
    window = PhaseWindow()
    assert window.add(0.0, PhaseTimes(idle_s=100)) == PhaseTimes()
    assert window.add(5.0, PhaseTimes(idle_s=104, forward_s=1)) == PhaseTimes(idle_s=4, forward_s=1)
    assert window.add(15.0, PhaseTimes(idle_s=104, forward_s=8)) == PhaseTimes(forward_s=7)
