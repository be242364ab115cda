"""Rotary tables against the official classes' rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import SHAPE, YARN
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from pegahpc.layers.rope_table import cis_table, inverse_frequencies
from pegahpc.models.lines import probe
from pegahpc.models.rope import Rope, Yarn

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "another theta": {"rope_type": "default", "rope_theta": 500.0},
    "yarn": YARN,
    "yarn of Kimi-K2": YARN | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0,
                               "mscale_all_dim": 1.0},
    "yarn with a magnitude": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}  # fmt: skip
DIMS = [8, 64]
POSITIONS = torch.arange(512)


def config_of(line: str, rope: dict[str, Any], dim: int) -> Any:
    changes = {"rope_parameters": dict(rope), "qk_rope_head_dim": dim, "q_lora_rank": 32}
    return DeepseekV2Config(**(SHAPE | changes)) if line == "v2" else DeepseekV3Config(**(SHAPE | changes))


def table_of(config: Any) -> torch.Tensor:
    spec = probe({name: value for name, value in config.to_dict().items() if name not in IGNORED})
    assert spec.rope is not None
    return cis_table(spec.rope, len(POSITIONS))


# What transformers adds to any configuration object and never writes into a checkpoint's config.json unchanged.
IGNORED = {"return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "problem_type",
           "is_encoder_decoder"}  # fmt: skip


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ROPES)
def test_v3s_cosines_and_sines_are_the_official_ones(name: str, dim: int) -> None:
    config = config_of("v3", ROPES[name], dim)
    official: Any = DeepseekV3RotaryEmbedding(config)
    cos, sin = official(torch.zeros(1, 1), POSITIONS[None])
    ours = torch.unflatten(table_of(config), 1, (-1, 2))
    torch.testing.assert_close(ours[..., 0], cos[0, :, : dim // 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[..., 1], sin[0, :, : dim // 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ROPES)
def test_v2s_complex_factors_are_the_official_ones(name: str, dim: int) -> None:
    config = config_of("v2", ROPES[name], dim)
    official: Any = DeepseekV2RotaryEmbedding(config)
    ours = torch.view_as_complex(torch.unflatten(table_of(config), 1, (-1, 2)).contiguous())
    torch.testing.assert_close(ours, official(torch.zeros(1, 1), POSITIONS[None])[0], rtol=1e-5, atol=1e-5)


def test_angles_worked_out_by_hand() -> None:
    table = cis_table(Rope(dim=4, theta=100.0, max_position=8), 3)
    want = [[f(p * w) for w in (1.0, 0.1) for f in (math.cos, math.sin)] for p in (0, 1, 2)]
    torch.testing.assert_close(table, torch.tensor(want))


def test_yarn_keeps_fast_pairs_and_divides_slow_ones_by_the_factor() -> None:
    plain = inverse_frequencies(Rope(dim=64, theta=10000.0, max_position=4096))
    yarn = Yarn(factor=40.0, original_max_position=4096)
    stretched = inverse_frequencies(Rope(dim=64, theta=10000.0, max_position=163840, yarn=yarn))
    # Pairs that turn 32 times or more in 4096 tokens: below 64 ln(4096 / (2 pi 32)) / (2 ln 10000) = 10.47;
    # once or less: above 64 ln(4096 / (2 pi)) / (2 ln 10000) = 22.51.
    assert torch.equal(stretched[:11], plain[:11])
    torch.testing.assert_close(stretched[23:], plain[23:] / 40)
    assert (stretched[11:23] < plain[11:23]).all() and (stretched[11:23] > plain[11:23] / 40).all()


def test_no_positions_give_an_empty_table() -> None:
    assert cis_table(Rope(dim=4, theta=100.0, max_position=8), 0).shape == (0, 4)
