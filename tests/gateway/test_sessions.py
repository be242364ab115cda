"""The bounded memory of which rank a conversation was on."""

from pegahpc.gateway.sessions import Sessions


def test_the_session_that_was_silent_for_longest_goes_first() -> None:
    sessions = Sessions(max_sessions=2)
    sessions.remember("a", 1)
    sessions.remember("b", 2)
    sessions.remember("a", 3)
    sessions.remember("c", 4)
    assert [sessions.rank_of(name) for name in "abc"] == [3, None, 4]


def test_no_session_is_not_a_session_that_all_share() -> None:
    sessions = Sessions()
    sessions.remember("", 1)
    assert sessions.rank_of("") is None


def test_a_rank_that_is_down_takes_its_sessions_and_no_others() -> None:
    sessions = Sessions()
    for name, rank in (("a", 0), ("b", 1), ("c", 0)):
        sessions.remember(name, rank)
    sessions.forget_rank(0)
    assert [sessions.rank_of(name) for name in "abc"] == [None, 1, None]


def test_ids_are_told_apart_in_full_whatever_bytes_they_have() -> None:
    sessions = Sessions()
    for rank, name in enumerate(("x" * 8000 + "1", "x" * 8000 + "2", "\udce9", "é")):
        sessions.remember(name, rank)
        assert sessions.rank_of(name) == rank
    assert sessions.rank_of("x" * 8000 + "1") == 0
