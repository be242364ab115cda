"""What the gateway knows of the ranks' caches, beside plain sets of names."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pegahpc.gateway.prefix_index import PrefixIndex
from pegahpc.wire.messages import KvEvents

NUM_RANKS = 3
A, B, C = b"a", b"b", b"c"


def attached(*pages: list[bytes]) -> PrefixIndex:
    index = PrefixIndex(len(pages))
    for rank, names in enumerate(pages):
        index.apply(rank, KvEvents(stored=names, is_snapshot=True))
    return index


def test_each_rank_counts_up_to_its_first_hole() -> None:
    index = attached([A, B, C], [A, C], [B, C], [A, B])
    assert index.prefix_pages([A, B, C]) == {0: 3, 1: 1, 3: 2}
    assert index.prefix_pages([A]) == {0: 1, 1: 1, 3: 1}
    assert index.prefix_pages([]) == {}


def test_more_ranks_than_bits_in_a_word_are_told_apart() -> None:
    index = attached(*[[A, B] if rank in (0, 63, 64, 99) else [A] for rank in range(100)])
    lengths = index.prefix_pages([A, B, C])
    assert len(lengths) == 100
    assert {rank for rank, num_pages in lengths.items() if num_pages == 2} == {0, 63, 64, 99}


def test_what_comes_before_the_first_snapshot_or_after_the_connection_broke_is_dropped() -> None:
    index = PrefixIndex(1)
    index.apply(0, KvEvents(stored=[A]))
    assert index.num_pages(0) == 0
    index.apply(0, KvEvents(is_snapshot=True))
    index.apply(0, KvEvents(stored=[A]))
    assert index.prefix_pages([A]) == {0: 1}
    index.forget(0)
    index.apply(0, KvEvents(stored=[A, B]))
    assert (index.num_pages(0), index.prefix_pages([A])) == (0, {})


def test_in_one_message_a_name_is_stored_before_it_is_removed() -> None:
    index = attached([])
    index.apply(0, KvEvents(stored=[A, B], removed=[A]))
    assert index.prefix_pages([B]) == {0: 1}
    assert index.prefix_pages([A]) == {}


NAMES = st.lists(st.sampled_from([bytes([value]) for value in range(6)]), max_size=6)
EVENTS = st.builds(KvEvents, stored=NAMES, removed=NAMES, is_snapshot=st.booleans())
REQUEST = st.sampled_from("pqrs")
WORDS = st.one_of(
    st.tuples(st.just("down"), st.none()),
    st.tuples(st.just("events"), EVENTS),
    st.tuples(st.just("sent"), st.tuples(REQUEST, NAMES)),
    st.tuples(st.just("settled"), REQUEST),
)


class PlainIndex:
    """One set a rank and one a request, walked page by page."""

    def __init__(self) -> None:
        self.known: dict[int, set[bytes]] = {}
        self.awaited: dict[str, tuple[int, set[bytes]]] = {}

    def apply(self, rank: int, events: KvEvents) -> None:
        if events.is_snapshot:
            self.known[rank] = set()
        if rank in self.known:
            self.known[rank] = (self.known[rank] | set(events.stored)) - set(events.removed)

    def await_pages(self, request_id: str, rank: int, names: list[bytes]) -> None:
        held = self.num_first(self.known.get(rank, set()), names)
        self.awaited[request_id] = (rank, set(names[held:]))

    def num_pages(self, rank: int, prompt: list[bytes]) -> int:
        awaited = [names for owner, names in self.awaited.values() if owner == rank]
        return self.num_first(self.known.get(rank, set()).union(*awaited), prompt)

    @staticmethod
    def num_first(names: set[bytes], prompt: list[bytes]) -> int:
        return next((idx for idx, name in enumerate(prompt) if name not in names), len(prompt))


@given(st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), WORDS), max_size=16), NAMES)
def test_it_agrees_with_plain_sets_that_are_walked_page_by_page(
    history: list[tuple[int, tuple[str, Any]]], prompt: list[bytes]
) -> None:
    index, plain = PrefixIndex(NUM_RANKS), PlainIndex()
    for rank, (what, said) in history:
        if what == "down":
            index.forget(rank)
            plain.known.pop(rank, None)
        elif what == "events":
            index.apply(rank, said)
            plain.apply(rank, said)
        elif what == "settled":
            index.settle(said)
            plain.awaited.pop(said, None)
        elif said[0] not in plain.awaited:
            index.await_pages(said[0], rank, said[1])
            plain.await_pages(said[0], rank, said[1])
    for rank in range(NUM_RANKS):
        assert index.num_pages(rank) == len(plain.known.get(rank, set()))
        assert index.prefix_pages(prompt).get(rank, 0) == plain.num_pages(rank, prompt)
    for rank in range(NUM_RANKS):
        index.forget(rank)
    for request_id in "pqrs":
        index.settle(request_id)
    assert index.prefix_pages(prompt) == {}
