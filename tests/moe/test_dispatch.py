"""Dispatch and combine on one rank, and the grouping of pairs, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegahpc.moe.dispatch import HAS_WORK, STOPPING, ChainView, LocalDispatcher, group_pairs, sort_pairs

ROUTES = {
    "no token": (3, []),
    "one token": (3, [[0, 2]]),
    "all tokens to one expert": (4, [[2], [2], [2], [2], [2]]),
    "odd counts": (5, [[0, 4, 1], [3, 4, 1], [1, 0, 2], [4, 3, 1], [0, 1, 2], [4, 1, 0], [1, 2, 3]]),
    "every expert": (3, [[0, 1, 2], [2, 1, 0]]),
}


def routed(name: str) -> tuple[LocalDispatcher, torch.Tensor, torch.Tensor]:
    num_experts, choices = ROUTES[name]
    topk = torch.tensor(choices, dtype=torch.int64).view(len(choices), len(choices[0]) if choices else 2)
    x = torch.randn(len(choices), 7, generator=torch.Generator().manual_seed(0))
    return LocalDispatcher(num_experts), x, topk


@pytest.mark.parametrize("name", ROUTES)
def test_each_expert_gets_its_rows_in_their_order(name: str) -> None:
    dispatcher, x, topk = routed(name)
    received = dispatcher.dispatch(x, topk)
    wanted = [[x[t].tolist() for t, row in enumerate(topk.tolist()) for e in row if e == expert]
              for expert in range(dispatcher.num_local_experts)]  # fmt: skip
    assert received.group_sizes == [len(rows) for rows in wanted]
    assert received.rows_QH.tolist() == [row for rows in wanted for row in rows]


@pytest.mark.parametrize("name", ROUTES)
def test_identity_experts_bring_every_row_home_to_every_slot(name: str) -> None:
    dispatcher, x, topk = routed(name)
    received = dispatcher.dispatch(x, topk)
    home = dispatcher.combine(received.rows_QH, received)
    assert torch.equal(home, x[:, None].expand(-1, topk.shape[1], -1))


@pytest.mark.parametrize("name", ROUTES)
def test_each_pair_gets_its_own_experts_output(name: str) -> None:
    dispatcher, x, topk = routed(name)
    received = dispatcher.dispatch(x, topk)
    experts = [e for e, size in enumerate(received.group_sizes) for _ in range(size)]
    home = dispatcher.combine(received.rows_QH + 100.0 * torch.tensor(experts, dtype=torch.float32)[:, None], received)
    assert home.shape == (*topk.shape, 7)
    for t, row in enumerate(topk.tolist()):
        for slot, expert in enumerate(row):
            torch.testing.assert_close(home[t, slot], x[t] + 100.0 * expert)


def test_the_word_of_a_lone_rank_is_the_fleets_view() -> None:
    dispatcher = LocalDispatcher(4)
    assert dispatcher.chain_view() == ChainView(has_work=False, is_stopping=False)
    for word, view in {
        HAS_WORK: ChainView(has_work=True, is_stopping=False),
        STOPPING: ChainView(has_work=False, is_stopping=True),
        HAS_WORK | STOPPING: ChainView(has_work=True, is_stopping=True),
        0: ChainView(has_work=False, is_stopping=False),
    }.items():
        dispatcher.begin_step(word)
        assert dispatcher.chain_view() == view


@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=20))
@settings(max_examples=60, deadline=None)
def test_sorted_pairs_are_those_of_a_stable_sort(choices: list[list[int]]) -> None:
    order, counts = sort_pairs(torch.tensor(choices, dtype=torch.int64).view(-1, 3), 7)
    flat = [expert for row in choices for expert in row]
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: flat[pair])
    assert counts.tolist() == [flat.count(expert) for expert in range(7)]


@given(st.integers(1, 5).flatmap(lambda width: st.lists(
    st.lists(st.integers(0, 4), min_size=width, max_size=width), min_size=1, max_size=5)))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_grouped_pairs_stand_by_expert_then_source_then_arrival(counts: list[list[int]]) -> None:
    arrived = [(source, expert, nth) for source, row in enumerate(counts) for expert, n in enumerate(row)
               for nth in range(n)]  # fmt: skip
    wanted = sorted(arrived, key=lambda pair: (pair[1], pair[0], pair[2]))
    places = group_pairs(np.array(counts, dtype=np.int64))
    assert places.tolist() == [wanted.index(pair) for pair in arrived]
