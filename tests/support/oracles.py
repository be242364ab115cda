"""Official classes as oracles, and small checkpoints of them whose faults show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

ASSETS = Path(__file__).parents[2] / "assets"
TINY_MOE = ASSETS / "tiny-moe"
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# name -> (line, what differs from SHAPE)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-greedy": ("v2", {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"}),
    "v2-groups-yarn": (
        "v2",
        {
            "q_lora_rank": 32, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.7, "rope_parameters": YARN,
        },
    ),
    "v3-groups": (
        "v3",
        {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "v3-tied-yarn": (
        "v3",
        {
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True,
            "routed_scaling_factor": 1.3, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}  # fmt: skip


def save_tiny(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Write a tiny checkpoint of this name, in several shards, with a wide init so that every fault shows."""
    line, changes = TINY[name]
    classes: dict[str, tuple[Any, Any]] = {
        "v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
        "v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    }
    config_class, model_class = classes[line]
    extra = {"num_nextn_predict_layers": 0} if line == "v3" else {}
    model = model_class(config_class(**(SHAPE | extra | changes)))
    widen(model, seed)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def widen(model: PreTrainedModel, seed: int) -> None:
    """Weights of std 1.5 / sqrt(fan in), norms around 1, router biases that move choices."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * 1.5 / tensor.shape[-1] ** 0.5)


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The official class on a checkpoint; layers for multi-token prediction are left out, as we do."""
    is_v2 = '"deepseek_v2"' in (folder / "config.json").read_text()
    oracle_class: Any = DeepseekV2ForCausalLM if is_v2 else DeepseekV3ForCausalLM
    previous = oracle_class._keys_to_ignore_on_load_unexpected
    oracle_class._keys_to_ignore_on_load_unexpected = [r"model\.layers\.6\..*"] if folder == TINY_MOE else previous
    try:
        model: PreTrainedModel = oracle_class.from_pretrained(folder, dtype=dtype)
    finally:
        oracle_class._keys_to_ignore_on_load_unexpected = previous
    model.train(False)
    return model


def oracle_logits(oracle: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[num_tokens, vocab], float32, of one sequence in one forward."""
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([tokens])).logits[0].float()
    return logits


def greedy(oracle: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The official generate, going on past every end of sequence."""
    assert oracle.generation_config is not None
    oracle.generation_config.eos_token_id = None
    with torch.no_grad():
        out = oracle.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
