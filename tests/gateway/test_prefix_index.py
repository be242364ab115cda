"""What the gateway knows of the ranks' caches, beside plain sets of names."""

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


@given(st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), st.none() | EVENTS), max_size=12), NAMES)
def test_it_agrees_with_one_set_a_rank_that_is_walked_page_by_page(
    history: list[tuple[int, KvEvents | None]], prompt: list[bytes]
) -> None:
    index = PrefixIndex(NUM_RANKS)
    known: dict[int, set[bytes]] = {}
    for rank, events in history:
        if events is None:
            index.forget(rank)
            known.pop(rank, None)
            continue
        index.apply(rank, events)
        if events.is_snapshot:
            known[rank] = set()
        if rank in known:
            known[rank] = (known[rank] | set(events.stored)) - set(events.removed)
    for rank in range(NUM_RANKS):
        names = known.get(rank, set())
        assert index.num_pages(rank) == len(names)
        num_pages = next((idx for idx, name in enumerate(prompt) if name not in names), len(prompt))
        assert index.prefix_pages(prompt).get(rank, 0) == num_pages
    for rank in range(NUM_RANKS):
        index.forget(rank)
    assert index.prefix_pages(prompt) == {}
