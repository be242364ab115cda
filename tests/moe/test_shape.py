"""What a router shape refuses, and the arguments that it gives the kernel."""

import re
from typing import Any

import pytest

from pegahpc.moe.shape import RouterShape

V3: dict[str, Any] = {"num_experts": 16, "num_topk": 4, "scoring": "sigmoid", "method": "noaux_tc"}
V2: dict[str, Any] = V3 | {
    "scoring": "softmax",
    "method": "group_limited_greedy",
    "num_groups": 4,
    "num_topk_groups": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "relu"}, "scoring 'relu' with method 'noaux_tc' is not known"),
        ({"method": "random"}, "scoring 'sigmoid' with method 'random' is not known"),
        ({"num_groups": 3}, "num_experts 16 is not a multiple of num_groups 3"),
        ({"num_topk": 17}, "1 groups of 16 hold fewer than 17 experts"),
        ({"num_groups": 8, "num_topk_groups": 1}, "1 groups of 2 hold fewer than 4 experts"),
        ({"num_groups": 4, "num_topk_groups": 5}, "num_topk_groups 5 is above num_groups 4"),
        ({"num_groups": 0}, "num_groups is 0, below 1"),
        ({"num_topk": 0}, "num_topk is 0, below 1"),
        ({"num_experts": 0}, "num_experts is 0, below 1"),
        ({"num_topk_groups": -1}, "num_topk_groups is -1, below 1"),
    ],
)
def test_an_impossible_router_is_refused_with_its_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RouterShape(**(V3 | changes))


def test_groups_may_hold_exactly_the_chosen_experts() -> None:
    assert RouterShape(**{**V3, "num_groups": 8, "num_topk_groups": 2}).num_topk == 4


def test_a_groups_score_takes_two_experts_with_a_bias_and_one_without() -> None:
    assert RouterShape(**V3).arguments["group_best"] == 2
    assert RouterShape(**V2).arguments["group_best"] == 1
