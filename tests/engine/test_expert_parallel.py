"""The free-running chain over real processes: equal step counts, a constant list of exchanges, the same bits."""

from pathlib import Path

import pytest
from engines import build, record_logits, request, run
from oracles import SHAPE, save_tiny
from worlds import Asked, run_world

from pegahpc.wire.messages import Sampling

NUM_MOE_LAYERS = SHAPE["num_hidden_layers"] - SHAPE["first_k_dense_replace"]
EXCHANGES_A_LAYER = {
    "torch": 3,  # counts, rows, outputs
    "fabric": 2,  # rows with their counts, outputs
}
SAMPLED = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


def asked(count: int, first: int) -> list[Asked]:
    lengths = [(3 + 5 * i, 8 + 3 * i) for i in range(count)]
    return [
        (f"{first + i}", [3 + (7 * first + 11 * i + 13 * j) % 300 for j in range(prompt)], num, SAMPLED)
        for i, (prompt, num) in enumerate(lengths)
    ]


@pytest.mark.parametrize("dispatcher", EXCHANGES_A_LAYER)
def test_ranks_with_unequal_work_leave_after_the_same_step_with_a_constant_chain(folder: Path, dispatcher: str) -> None:
    shares = [asked(4, 0), asked(1, 4)]  # rank 1 is done long before rank 0
    results = run_world(folder, shares, num_experts=8, hidden=SHAPE["hidden_size"], dispatcher=dispatcher)
    assert results[0].steps == results[1].steps
    for result in results:
        assert result.exchanges == result.steps * NUM_MOE_LAYERS * EXCHANGES_A_LAYER[dispatcher]
    engine = build(folder)
    alone = run(engine, [request(n, p, m, Sampling(**s)) for n, p, m, s in shares[0] + shares[1]])
    assert results[0].tokens | results[1].tokens == alone.tokens


@pytest.mark.parametrize(("world_size", "dispatcher"), [(2, "torch"), (2, "fabric"), (4, "fabric")])
def test_a_rows_bits_do_not_depend_on_width_dispatcher_or_what_peers_do(
    folder: Path, world_size: int, dispatcher: str
) -> None:
    """One request on the last rank, beside busy peers, against the same request alone on one rank."""
    ((name, prompt, num, sampling),) = asked(1, 9)
    shares = [asked(3, 20 * rank) for rank in range(world_size - 1)] + [[(name, prompt, num, sampling)]]
    results = run_world(folder, shares, num_experts=8, hidden=SHAPE["hidden_size"], dispatcher=dispatcher)
    engine = build(folder)
    alone = record_logits(engine)
    run(engine, [request(name, prompt, num, Sampling(**sampling))])
    assert len(alone) == num and results[-1].logits == alone
