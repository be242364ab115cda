"""The order of a row's tokens, against Python's sort."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pegahpc.engine.ranking import PIECE_ELEMENTS, all_ids, ids_of, in_order, order_keys, pieces

# Few different values, so that most rows have equal ones; both zeros, the ends of float32, and what is masked.
VALUES = [0.0, -0.0, 1.0, -1.0, 1.0000001, -2.5, 1e-45, -1e-45, 3.4028234e38, -3.4028234e38, float("-inf")]
ROWS = st.lists(st.sampled_from(VALUES) | st.floats(width=32, allow_nan=False), min_size=1, max_size=40)


@given(ROWS)
def test_the_larger_logit_comes_first_and_of_equals_the_lower_id(row: list[float]) -> None:
    logits = torch.tensor([row])
    row = logits[0].tolist()  # as float32 holds them
    values, ids = in_order(logits)
    want = sorted(range(len(row)), key=lambda idx: (-row[idx], idx))
    assert ids[0].tolist() == want
    assert values[0].tolist() == [row[idx] for idx in want]


@given(ROWS, st.data())
def test_the_first_few_are_the_first_of_all_however_many_are_asked_for(row: list[float], data: st.DataObject) -> None:
    logits = torch.tensor([row])
    count = data.draw(st.integers(0, len(row)))
    first = ids_of(order_keys(logits, all_ids(logits)).topk(count, largest=False).values)
    assert first[0].tolist() == in_order(logits)[1][0, :count].tolist()


def test_rows_do_not_meet() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [9.0, 7.0, 8.0]])
    assert in_order(logits)[1].tolist() == [[1, 2, 0], [0, 2, 1]]
    assert logits.tolist() == [[1.0, 3.0, 2.0], [9.0, 7.0, 8.0]]


def test_pieces_cover_all_rows_and_bound_what_is_there_at_once() -> None:
    assert list(pieces(0, 100)) == []
    assert list(pieces(20, 129_280)) == [slice(0, 8), slice(8, 16), slice(16, 20)]
    assert list(pieces(2, PIECE_ELEMENTS + 1)) == [slice(0, 1), slice(1, 2)]
