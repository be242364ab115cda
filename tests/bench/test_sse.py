"""Events come out whole, whatever pieces the network makes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegahpc.bench.sse import MAX_EVENT_BYTES, EventStream

STREAM = (
    'data: {"a": 1}\n\n: a comment\n\nevent: x\ndata: one\ndata:two\r\n\r\ndata: grüße\n\ndata: [DONE]\n\n'.encode()
)
EVENTS = [b'{"a": 1}', b"one\ntwo", "grüße".encode(), b"[DONE]"]


@given(st.lists(st.integers(1, len(STREAM)), max_size=12))
def test_every_cut_gives_the_same_events(cuts: list[int]) -> None:
    stream, found, begin = EventStream(), [], 0
    for end in [*sorted(cuts), len(STREAM)]:
        found += stream.feed(STREAM[begin:end])
        begin = end
    assert found == EVENTS


def test_an_event_that_is_not_closed_is_none() -> None:
    assert EventStream().feed(b'data: {"a": 1}\n') == []


def test_a_line_of_any_length_is_read_up_to_a_bound() -> None:
    long = b"data: " + b"x" * 300_000 + b"\n\n"
    assert EventStream().feed(long) == [b"x" * 300_000]
    with pytest.raises(ValueError, match="an event of more than"):
        EventStream().feed(b"x" * (MAX_EVENT_BYTES + 1))
