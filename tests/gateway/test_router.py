"""Which rank is chosen, by numbers worked out by hand."""

from pegahpc.gateway.router import RankView, least_loaded
from pegahpc.wire.messages import Load, RequestUpdate, StepOutputs


def report(view: RankView, num_running: int, num_waiting: int, *updated: str) -> None:
    load = Load(num_running=num_running, num_waiting=num_waiting, used_pages=0, total_pages=1)
    view.on_report(StepOutputs(rank=0, step=1, load=load, updates=[RequestUpdate(id=name) for name in updated]))


def views_of(*loads: tuple[int, int]) -> list[RankView]:
    views = [RankView() for _ in loads]
    for view, (num_running, num_waiting) in zip(views, loads, strict=True):
        report(view, num_running, num_waiting)
    return views


def test_a_waiting_request_weighs_as_much_as_four_running_ones() -> None:
    assert least_loaded(views_of((5, 0), (0, 1))) == 1
    assert least_loaded(views_of((3, 0), (0, 1))) == 0


def test_ties_go_to_the_lowest_rank() -> None:
    assert least_loaded(views_of((1, 0), (0, 0), (0, 0))) == 1
    assert least_loaded(views_of((4, 0), (0, 1))) == 0


def test_what_was_just_sent_counts_before_the_rank_has_reported_it() -> None:
    views = views_of((0, 0), (3, 0), (0, 2))
    chosen = []
    for idx in range(4):
        rank = least_loaded(views)
        views[rank].on_sent(str(idx))
        chosen.append(rank)
    assert chosen == [0, 1, 0, 1]  # scores 0 3 8, 4 3 8, 4 7 8, 8 7 8


def test_a_request_is_not_counted_twice_once_the_rank_has_spoken_of_it() -> None:
    (view,) = views_of((0, 0))
    view.on_sent("a")
    report(view, 1, 0, "a")
    assert view.score == 1


def test_the_first_report_after_a_send_may_be_older_than_the_send() -> None:
    (view,) = views_of((0, 0))
    view.on_sent("a")
    report(view, 0, 0)
    assert view.score == 4
    report(view, 0, 1)
    assert view.score == 4


def test_a_request_that_ended_before_any_report_no_longer_counts() -> None:
    (view,) = views_of((0, 0))
    view.on_sent("a")
    view.on_closed("a")
    assert view.score == 0
