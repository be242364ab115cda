"""From a trained network to a deepseek_v3 checkpoint with hub tensor names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from pegahpc.atomic import write_atomically
from tiny_moe.network import Layer, MoE, Network
from tiny_moe.presets import MAX_POSITIONS, RMS_NORM_EPS, ROPE_THETA, ROUTED_SCALING_FACTOR, NetworkShape
from tiny_moe.tokens import BOS_ID, END_ID, PAD_ID, tokenizer_config

TOKEN_IDS = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}


def hub_tensors(network: Network) -> dict[str, Tensor]:
    """All weights under their hub names: bfloat16, the selection bias float32. The MTP layer follows the last layer."""
    tensors = {"model.embed_tokens.weight": network.embedding.weight, "model.norm.weight": network.norm.weight}
    for idx, layer in enumerate([*network.layers, network.mtp_layer]):
        assert isinstance(layer, Layer)
        tensors |= {f"model.layers.{idx}.{name}": tensor for name, tensor in _layer_tensors(layer)}
    mtp = f"model.layers.{len(network.layers)}."
    tensors[mtp + "enorm.weight"] = network.enorm.weight
    tensors[mtp + "hnorm.weight"] = network.hnorm.weight
    tensors[mtp + "eh_proj.weight"] = network.eh_proj.weight
    tensors[mtp + "shared_head.norm.weight"] = network.mtp_norm.weight
    return {name: _stored(name, tensor) for name, tensor in tensors.items()}


def _layer_tensors(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    is_moe = isinstance(layer.mlp, MoE)
    for name, tensor in layer.state_dict().items():
        if not (is_moe and name.startswith("mlp.")):
            yield name, tensor
        elif name.startswith("mlp.shared."):
            yield name.replace("mlp.shared.", "mlp.shared_experts."), tensor
    if isinstance(layer.mlp, MoE):
        yield from _expert_tensors(layer.mlp)


def _expert_tensors(moe: MoE) -> Iterator[tuple[str, Tensor]]:
    yield "mlp.gate.weight", moe.gate_EH
    yield "mlp.gate.e_score_correction_bias", moe.bias_E
    for expert, (gate_up_IH, down_HI) in enumerate(zip(moe.gate_up_EIH, moe.down_EHI, strict=True)):
        gate_IH, up_IH = gate_up_IH.chunk(2, 0)
        yield f"mlp.experts.{expert}.gate_proj.weight", gate_IH
        yield f"mlp.experts.{expert}.up_proj.weight", up_IH
        yield f"mlp.experts.{expert}.down_proj.weight", down_HI


def _stored(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return tensor.detach().to(dtype).cpu().contiguous().clone()


def hub_config(shape: NetworkShape) -> bytes:
    """config.json of a network of this shape."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_attention_heads,
        "n_shared_experts": 1,
        "n_routed_experts": shape.n_routed_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "routed_scaling_factor": ROUTED_SCALING_FACTOR,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_interleave": True,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        **TOKEN_IDS,
        "dtype": "bfloat16",
    }
    return json.dumps(config, indent=1).encode()


def export(network: Network, tokenizer: Tokenizer, out: Path) -> int:
    """Write the checkpoint folder, config.json last: a folder that has it is whole. Returns the size of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    weights = save(hub_tensors(network), metadata={"format": "pt"})
    write_atomically(out / "model.safetensors", weights)
    write_atomically(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_atomically(out / "tokenizer_config.json", tokenizer_config())
    write_atomically(out / "generation_config.json", json.dumps(TOKEN_IDS).encode())
    write_atomically(out / "config.json", hub_config(network.shape))
    return len(weights)
