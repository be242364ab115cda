"""Faults that a gate must see: in the engine, or in the weights before they are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pegahpc.checkpoint import load
from pegahpc.engine.loop import Engine
from pegahpc.mla.attention import LatentAttention
from pegahpc.mla.shape import LatentShape
from pegahpc.moe.layer import MoELayer, MoEWeights
from pegahpc.moe.shape import RouterShape


def swap_rope_pairs(engine: Engine) -> None:
    table = engine.runner._cis_table
    engine.runner._cis_table = torch.unflatten(table, 1, (-1, 2)).flip(2).flatten(1).contiguous()


def move_the_scale_by_two_percent(shape: LatentShape) -> LatentShape:
    return replace(shape, softmax_scale=shape.softmax_scale * 1.02)


def ignore_the_router_bias(weights: MoEWeights) -> None:
    if weights.bias_E is not None:
        weights.bias_E.zero_()


def negate_expert_five(weights: MoEWeights) -> None:
    assert weights.down_EIH is not None
    weights.down_EIH[5].neg_()


ENGINE_FAULTS: list[Callable[[Engine], None]] = [swap_rope_pairs]
WEIGHT_FAULTS: list[Callable[[MoEWeights], None]] = [ignore_the_router_bias, negate_expert_five]
FAULTS: list[Callable[[Any], Any]] = [*ENGINE_FAULTS, *WEIGHT_FAULTS, move_the_scale_by_two_percent]


def engine_with(fault: Callable[[Any], Any], build: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine that `build` makes, with this fault in it."""

    def broken(shape: RouterShape, weights: MoEWeights, *rest: Any) -> MoELayer:
        fault(weights)
        return MoELayer(shape, weights, *rest)

    if fault in WEIGHT_FAULTS:
        monkeypatch.setattr(load, "MoELayer", broken)
    if fault is move_the_scale_by_two_percent:
        monkeypatch.setattr(
            load, "LatentAttention", lambda shape, *rest: LatentAttention(move_the_scale_by_two_percent(shape), *rest)
        )
    engine = build()
    if fault in ENGINE_FAULTS:
        fault(engine)
    return engine
