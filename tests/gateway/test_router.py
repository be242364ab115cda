"""Which rank is chosen, by numbers worked out by hand."""

from collections.abc import Callable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from pegahpc.gateway.rank_view import RankView
from pegahpc.gateway.router import Choice, RouteHint, Router, choose
from pegahpc.wire.messages import KvEvents, Load, RequestUpdate, StepOutputs


def report(view: RankView, num_running: int, num_waiting: int, *updated: str) -> None:
    load = Load(num_running=num_running, num_waiting=num_waiting, used_pages=0, total_pages=1)
    view.on_report(StepOutputs(rank=0, step=1, load=load, updates=[RequestUpdate(id=name) for name in updated]))


def views_of(*loads: tuple[int, int]) -> list[RankView]:
    views = [RankView() for _ in loads]
    for view, (num_running, num_waiting) in zip(views, loads, strict=True):
        report(view, num_running, num_waiting)
    return views


def least_loaded(views: list[RankView]) -> int:
    loads = {rank: view.score for rank, view in enumerate(views)}
    return choose(loads, {}, session_rank=None, load_bound=0).rank


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


def pick(
    loads: Mapping[int, int], prefix_pages: Mapping[int, int], *, session_rank: int | None = None, load_bound: int = 8
) -> Choice:
    return choose(loads, prefix_pages, session_rank=session_rank, load_bound=load_bound)


def test_a_session_goes_before_a_prefix_and_a_prefix_before_load() -> None:
    assert pick({0: 0, 1: 4, 2: 8}, {1: 9}, session_rank=2) == (2, "session")
    assert pick({0: 0, 1: 4, 2: 8}, {1: 9}) == (1, "prefix")
    assert pick({0: 0, 1: 4, 2: 8}, {}) == (0, "load")


def test_the_longest_prefix_wins_then_the_lesser_load_then_the_lower_rank() -> None:
    assert pick({0: 0, 1: 0, 2: 8}, {0: 1, 1: 2, 2: 3}) == (2, "prefix")
    assert pick({0: 5, 1: 4, 2: 4}, {0: 2, 1: 2, 2: 2}) == (1, "prefix")
    assert pick({2: 4, 1: 4, 0: 9}, {2: 2, 1: 2, 0: 2}) == (1, "prefix")


def test_both_yield_beyond_the_bound_and_not_at_it() -> None:
    assert pick({0: 1, 1: 9}, {1: 5}, session_rank=1) == (1, "session")
    assert pick({0: 1, 1: 10}, {1: 5}, session_rank=1) == (0, "load")
    assert pick({0: 1, 1: 9}, {1: 5}) == (1, "prefix")
    assert pick({0: 1, 1: 10}, {1: 5}) == (0, "load")
    assert pick({0: 1, 1: 1}, {1: 5}, load_bound=0) == (1, "prefix")
    assert pick({0: 1, 1: 2}, {1: 5}, load_bound=0) == (0, "load")


def test_an_overloaded_session_falls_back_to_a_prefix_and_an_overloaded_prefix_to_the_next_one() -> None:
    assert pick({0: 0, 1: 9, 2: 8}, {1: 7, 2: 3}, session_rank=1) == (2, "prefix")


def test_ranks_that_are_not_live_are_no_choice_for_any_reason() -> None:
    assert pick({3: 50}, {0: 9, 1: 9}, session_rank=2) == (3, "load")


@given(
    st.dictionaries(st.integers(0, 5), st.integers(0, 12), min_size=1),
    st.dictionaries(st.integers(0, 5), st.integers(1, 4)),
    st.none() | st.integers(0, 5),
    st.integers(0, 10),
)
def test_the_choice_is_that_of_a_list_sorted_by_the_written_policy(
    loads: dict[int, int], prefix_pages: dict[int, int], session_rank: int | None, load_bound: int
) -> None:
    rows = []
    for rank, load in loads.items():
        is_near = all(load - other <= load_bound for other in loads.values())
        num_pages = prefix_pages.get(rank, 0) if is_near else 0
        is_session = is_near and rank == session_rank
        rows.append((not is_session, -num_pages, load, rank))
    is_other, negative_pages, _, rank = sorted(rows)[0]
    reason = "load" if not negative_pages else "prefix"
    assert choose(loads, prefix_pages, session_rank=session_rank, load_bound=load_bound) == (
        rank,
        reason if is_other else "session",
    )


IDLE = Load(num_running=0, num_waiting=0, used_pages=0, total_pages=1)


def router_of(num_ranks: int, *stored: bytes, load_bound: int = 8, clock: Callable[[], float] = lambda: 0.0) -> Router:
    """Idle ranks, the first of which has these pages."""
    router = Router(num_ranks, load_bound=load_bound, clock=clock)
    for rank in range(num_ranks):
        events = KvEvents(stored=[] if rank else list(stored), is_snapshot=True)
        router.on_report(StepOutputs(rank=rank, step=1, load=IDLE, kv_events=events))
    return router


def send(router: Router, request_id: str, *names: bytes) -> Choice:
    hint = RouteHint(names)
    choice = router.route(hint, live=range(len(router.views)))
    router.on_sent(choice.rank, request_id, hint)
    return choice


def test_a_hot_prefix_spreads_over_all_ranks_as_its_load_grows() -> None:
    router = router_of(4, b"hot")
    chosen = [send(router, str(idx), b"hot") for idx in range(14)]
    # 4 a request just sent: a rank takes three, then the next one, which has it too from then on
    assert [rank for rank, _ in chosen] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 1]
    assert [idx for idx, (_, reason) in enumerate(chosen) if reason == "load"] == [3, 6, 9]


def test_a_burst_with_one_new_prefix_goes_to_as_few_ranks_as_the_load_bound_allows() -> None:
    chosen = [send(router, str(idx), b"new", bytes([idx])).rank for router in [router_of(8)] for idx in range(16)]
    assert chosen == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5]  # three make 12, 8 more than the next one has
    chosen = [
        send(router, str(idx), b"new", bytes([idx])).rank
        for router in [router_of(8, load_bound=64)]
        for idx in range(16)
    ]
    assert chosen == [0] * 16


def test_what_a_rank_is_about_to_store_counts_until_the_request_is_over() -> None:
    router = router_of(2)
    assert send(router, "a", b"x", b"y") == (0, "load")
    assert send(router, "b", b"x") == (0, "prefix")
    router.on_closed(0, "a")
    assert send(router, "c", b"x") == (0, "prefix")  # b will store it
    assert send(router, "d", b"y") == (1, "load")
    router.on_closed(0, "b")
    router.on_closed(0, "c")
    assert router.prefixes.prefix_pages([b"x"]) == {}
    router.on_closed(1, "d")
    router.on_closed(1, "d")  # nobody minds
    assert router.prefixes.prefix_pages([b"y"]) == {}


def test_after_the_first_token_only_what_the_rank_says_counts() -> None:
    router = router_of(2)
    send(router, "a", b"x", b"y", b"z")
    scheduled = StepOutputs(rank=0, step=2, load=IDLE, updates=[RequestUpdate(id="a")])
    router.on_report(scheduled)
    assert router.prefixes.prefix_pages([b"x", b"y", b"z"]) == {0: 3}
    first = StepOutputs(
        rank=0,
        step=3,
        load=IDLE,
        updates=[RequestUpdate(id="a", tokens=[7])],
        kv_events=KvEvents(stored=[b"x", b"y"]),
    )
    router.on_report(first)
    assert router.prefixes.prefix_pages([b"x", b"y", b"z"]) == {0: 2}


def test_what_a_rank_has_not_stored_for_a_minute_no_longer_counts() -> None:
    now_s = 0.0
    router = router_of(3, clock=lambda: now_s)
    send(router, "a", b"x")
    now_s = 30.0
    send(router, "b", b"x", b"y")
    now_s = 59.9
    assert router.prefixes.prefix_pages([b"x", b"y"]) == {0: 2}
    now_s = 89.9
    assert router.prefixes.prefix_pages([b"x", b"y"]) == {0: 2}
    now_s = 90.1
    assert router.prefixes.prefix_pages([b"x", b"y"]) == {}
    router.on_closed(0, "a")
    assert send(router, "c", b"x") == (1, "load")


def test_a_session_follows_its_requests_and_is_forgotten_with_its_rank() -> None:
    router = Router(3, load_bound=8)
    hint = RouteHint(session="a")
    assert router.route(hint, live=[1, 2]) == (1, "load")
    assert router.route(hint, live=[0, 1, 2]) == (1, "session")
    assert router.route(hint, live=[2]) == (2, "load")
    assert router.route(hint, live=[0, 1, 2]) == (2, "session")
    router.on_down(2)
    assert router.route(hint, live=[0, 1, 2]) == (0, "load")
