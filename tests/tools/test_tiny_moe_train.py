"""The trainer against the official class: what it exports is what transformers computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_moe.corpus import write_corpus
from tiny_moe.export import hub_config, hub_tensors
from tiny_moe.network import Network
from tiny_moe.presets import MICRO, SHIPPED
from tiny_moe.tokens import tokenizer_config
from tiny_moe.train import Data, train

SHIPPED_FOLDER = Path(__file__).parents[2] / "assets" / "tiny-moe"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """A micro network after its twenty steps: the losses and the checkpoint folder."""
    folder = tmp_path_factory.mktemp("tiny_moe")
    write_corpus(folder / "corpus.txt", 300, seed=0)
    return train(MICRO, [folder / "corpus.txt"], folder / "out"), folder / "out"


def wide_network() -> Network:
    """Weights that bfloat16 holds exactly, wide enough that a fault in any part shows in the logits."""
    torch.manual_seed(0)
    network = Network(MICRO.shape).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1).copy_(parameter.bfloat16())
    for moe in network.moe_layers():
        moe.bias_E.normal_(std=0.3)
    return network


def load_official(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import DeepseekV3ForCausalLM

    loaded: Any = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return loaded[0].eval(), loaded[1]


def test_twenty_steps_lower_the_loss(run: tuple[list[float], Path]) -> None:
    losses, _ = run
    assert len(losses) == 20
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5


def test_transformers_loads_the_export_and_misses_nothing(run: tuple[list[float], Path]) -> None:
    _, info = load_official(run[1])
    assert info["missing_keys"] == set()
    mtp = f"model.layers.{MICRO.shape.num_hidden_layers}."
    assert info["unexpected_keys"] and all(name.startswith(mtp) for name in info["unexpected_keys"])


def test_the_main_logits_are_the_official_ones(tmp_path: Path) -> None:
    network = wide_network()
    (tmp_path / "config.json").write_bytes(hub_config(MICRO.shape))
    save_file(hub_tensors(network), tmp_path / "model.safetensors", metadata={"format": "pt"})
    official, _ = load_official(tmp_path)
    tokens = torch.randint(0, MICRO.shape.vocab_size, (2, 18), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = official(tokens[:, :16]).logits
        limit = 2e-4 * float(want.max() - want.min())
        assert float((network(tokens)[0] - want).abs().max()) <= limit
        network.sin.zero_()  # the control: a network that does not rotate
        assert float((network(tokens)[0] - want).abs().max()) > 10 * limit


def test_the_shipped_shape_exports_the_shipped_files() -> None:
    torch.manual_seed(0)
    tensors = hub_tensors(Network(SHIPPED.shape))
    shipped = load_file(SHIPPED_FOLDER / "model.safetensors")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in shipped.items()
    }
    assert hub_config(SHIPPED.shape) == (SHIPPED_FOLDER / "config.json").read_bytes()
    assert tokenizer_config() == (SHIPPED_FOLDER / "tokenizer_config.json").read_bytes()


def test_a_corpus_smaller_than_a_window_is_refused() -> None:
    stream = torch.zeros(MICRO.window + 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="too small"):
        Data(stream, stream, MICRO).batch(stream)


def test_balancing_raises_the_bias_of_the_expert_that_got_less() -> None:
    moe = Network(MICRO.shape).moe_layers()[0]
    moe.load_E.copy_(torch.tensor([0.0, 8.0, 4.0, 4.0]))
    moe.balance(0.25)
    assert moe.bias_E.tolist() == [0.25, -0.25, 0.0, 0.0]
    assert moe.load_E.tolist() == [0.0] * 4


def test_the_config_names_what_the_line_needs() -> None:
    config = json.loads(hub_config(MICRO.shape))
    assert config["num_nextn_predict_layers"] == 1 and config["model_type"] == "deepseek_v3"
