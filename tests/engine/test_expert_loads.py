"""What the experts were asked to do, as the engine counts it, against the router's own choices."""

from pathlib import Path

import pytest
import torch
from engines import build, request, run
from oracles import SHAPE, save_tiny

from pegahpc.moe.expert_load import ExpertLoad
from pegahpc.moe.layer import MoELayer

TOPK, NUM_MOE_LAYERS = SHAPE["num_experts_per_tok"], 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


def test_rows_and_distinct_experts_are_counted_by_step() -> None:
    load = ExpertLoad(4)
    for sizes in ([3, 0, 1, 0], [0, 0, 5, 0], [0, 0, 0, 0]):
        load.count(sizes)
    assert load.rows == [3, 0, 6, 0]
    assert load.num_seen == 3  # two in the first step, one in the second


def test_the_counts_are_those_of_the_routers_choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(folder, "engine.backends.program=parts")
    layers = [layer.ffn for layer in engine.runner.decoder.layers if isinstance(layer.ffn, MoELayer)]
    chosen: list[list[torch.Tensor]] = [[] for _ in layers]
    for layer, seen in zip(layers, chosen, strict=True):
        dispatch = layer.dispatcher.dispatch

        def spy(x: torch.Tensor, idx: torch.Tensor, seen=seen, dispatch=dispatch) -> object:  # type: ignore[no-untyped-def]
            seen.append(idx.clone())
            return dispatch(x, idx)

        monkeypatch.setattr(layer, "dispatcher", type("Spy", (), {"dispatch": staticmethod(spy), "combine": layer.dispatcher.combine}))  # fmt: skip  # noqa: E501
    before = engine.expert_loads()
    run(engine, [request(str(i), list(range(3, 20 + i)), 6) for i in range(3)])
    after = engine.expert_loads()
    assert len(after.layers) == len(layers) == NUM_MOE_LAYERS
    assert after.num_steps - before.num_steps == len(chosen[0])  # every step had work
    num_rows = sum(17 + i for i in range(3)) + 3 * 5  # the last token of each is sampled and not computed
    for told, steps in zip(after.layers, chosen, strict=True):
        want = torch.bincount(torch.cat([idx.flatten() for idx in steps]), minlength=8)
        assert told.rows == want.tolist() and sum(told.rows) == num_rows * TOPK
        assert told.num_seen == sum(len(set(idx.flatten().tolist())) for idx in steps)


def test_an_idle_step_counts_nothing(folder: Path) -> None:
    engine = build(folder)
    for _ in range(3):
        engine.step()
    told = engine.expert_loads()
    assert told.num_steps == 0 and all(sum(layer.rows) == layer.num_seen == 0 for layer in told.layers)
