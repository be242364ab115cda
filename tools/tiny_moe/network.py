"""The network that trains: latent attention, sigmoid router with selection bias, shared expert, one MTP layer.

Plain torch, small and exact: every expert is computed densely and weighted by the sparse gate, which compiles well at
these sizes. It shares no line with the serving code, so a checkpoint from here also tests that code.

**Source**: DeepSeek-V3 technical report (arXiv 2412.19437), sections 2.1 and 2.2.

Shapes: B rows, T tokens of a row, H hidden, N heads, Q query-key width of a head, R rotated width, V value width,
E experts, K experts of a token, I expert width, W vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny_moe.presets import MAX_POSITIONS, RMS_NORM_EPS, ROPE_THETA, ROUTED_SCALING_FACTOR, NetworkShape


def linear(num_in: int, num_out: int) -> nn.Linear:
    """A linear map without bias: the only kind that the line has."""
    return nn.Linear(num_in, num_out, bias=False)


def rotate(x: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate interleaved pairs, pair i being (x[2i], x[2i + 1]). The result holds all firsts, then all seconds."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos_TR - second * sin_TR, second * cos_TR + first * sin_TR], -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a plain weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, RMS_NORM_EPS)


class LatentAttention(nn.Module):
    """Multi-head latent attention in its expanded form, causal over the row."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        heads = shape.num_attention_heads
        self.shape = shape
        self.q_a_proj = linear(shape.hidden_size, shape.q_lora_rank)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank)
        self.q_b_proj = linear(shape.q_lora_rank, heads * shape.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(shape.hidden_size, shape.kv_lora_rank + shape.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank)
        self.kv_b_proj = linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        self.o_proj = linear(heads * shape.v_head_dim, shape.hidden_size)

    def forward(self, x_BTH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        shape, (rows, tokens, _) = self.shape, x_BTH.shape
        heads, nope, rope = shape.num_attention_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim
        q_BTX = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTH)))
        q_nope, q_rope = q_BTX.view(rows, tokens, heads, -1).transpose(1, 2).split([nope, rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTH).split([shape.kv_lora_rank, rope], -1)
        kv_BTX = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, tokens, heads, -1)
        k_nope, v_BNTV = kv_BTX.transpose(1, 2).split([nope, shape.v_head_dim], -1)
        k_rope = rotate(k_rope.view(rows, 1, tokens, -1), cos_TR, sin_TR).expand(-1, heads, -1, -1)
        q_BNTQ = torch.cat([q_nope, rotate(q_rope, cos_TR, sin_TR)], -1)
        k_BNTQ = torch.cat([k_nope, k_rope], -1)
        scale = shape.qk_head_dim**-0.5
        out_BNTV = F.scaled_dot_product_attention(q_BNTQ, k_BNTQ, v_BNTV, is_causal=True, scale=scale)
        out_BTH: Tensor = self.o_proj(out_BNTV.transpose(1, 2).reshape(rows, tokens, -1))
        return out_BTH


class GatedMLP(nn.Module):
    """The dense feed-forward network, and the shared expert."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden_size, width), linear(hidden_size, width)
        self.down_proj = linear(width, hidden_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        out_BTH: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTH)) * self.up_proj(x_BTH))
        return out_BTH


class MoE(nn.Module):
    """Routed experts and one shared expert. `bias` moves the choice only and is trained by load, not by gradient."""

    bias_E: Tensor
    load_E: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        experts, hidden, width = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.num_topk = shape.num_experts_per_tok
        self.gate_EH = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("bias_E", torch.zeros(experts))
        self.register_buffer("load_E", torch.zeros(experts))
        self.gate_up_EIH = nn.Parameter(torch.randn(experts, 2 * width, hidden) * hidden**-0.5)
        self.down_EHI = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5 * 0.5)
        self.shared = GatedMLP(hidden, width)

    def forward(self, x_BTH: Tensor) -> Tensor:
        weights_BTE = self.route(x_BTH).to(x_BTH.dtype)
        gate_BTEI, up_BTEI = torch.einsum("bth,eih->btei", x_BTH, self.gate_up_EIH).chunk(2, -1)
        inner_BTEI = F.silu(gate_BTEI) * up_BTEI * weights_BTE.unsqueeze(-1)
        routed_BTH = torch.einsum("btei,ehi->bth", inner_BTEI, self.down_EHI)
        out_BTH: Tensor = routed_BTH + self.shared(x_BTH)
        return out_BTH

    def route(self, x_BTH: Tensor) -> Tensor:
        """Weight of every expert for every token, `[B, T, E]` float32, 0 for those not chosen."""
        with torch.autocast(x_BTH.device.type, enabled=False):
            scores_BTE = torch.sigmoid(F.linear(x_BTH.float(), self.gate_EH.float()))
        topk_idx_BTK = (scores_BTE + self.bias_E).topk(self.num_topk, -1).indices
        topk_BTK = scores_BTE.gather(-1, topk_idx_BTK)
        topk_BTK = topk_BTK / (topk_BTK.sum(-1, keepdim=True) + 1e-20) * ROUTED_SCALING_FACTOR
        if self.training:
            chosen = F.one_hot(topk_idx_BTK, scores_BTE.shape[-1]).float()
            self.load_E.add_(chosen.sum((0, 1, 2)).detach())
        return torch.zeros_like(scores_BTE).scatter(-1, topk_idx_BTK, topk_BTK)

    def balance(self, step_size: float) -> None:
        """Raise the bias of experts that got less than the mean, lower the others, and start counting anew."""
        self.bias_E.add_(torch.sign(self.load_E.mean() - self.load_E), alpha=step_size)
        self.load_E.zero_()


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: NetworkShape, *, is_moe: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = MoE(shape) if is_moe else GatedMLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x_BTH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), cos_TR, sin_TR)
        out_BTH: Tensor = x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))
        return out_BTH


class Network(nn.Module):
    """The language model: layer 0 dense, the others MoE, head tied to the embedding, one MTP layer behind."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, hidden)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        self.layers = nn.ModuleList(Layer(shape, is_moe=idx > 0) for idx in range(shape.num_hidden_layers))
        self.norm = RMSNorm(hidden)
        self.enorm, self.hnorm, self.eh_proj = RMSNorm(hidden), RMSNorm(hidden), linear(2 * hidden, hidden)
        self.mtp_layer, self.mtp_norm = Layer(shape, is_moe=True), RMSNorm(hidden)
        pairs = torch.arange(0, shape.qk_rope_head_dim, 2).float() / shape.qk_rope_head_dim
        angles = torch.outer(torch.arange(MAX_POSITIONS).float(), 1 / ROPE_THETA**pairs)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the main layers and of the MTP layer.

        Args:
            tokens_BX: `[B, T + 2]`. Position t predicts token t + 1 (main) and, shown token t + 1, token t + 2 (MTP).

        Returns:
            Two tensors `[B, T, W]`.
        """
        window = tokens_BX.shape[1] - 2
        embedded = self.embedding(tokens_BX[:, : window + 1])
        x_BTH = embedded[:, :window]
        for layer in self.layers:
            x_BTH = layer(x_BTH, self.cos[:window], self.sin[:window])
        x_BTH = self.norm(x_BTH)
        y_BTH = self.eh_proj(torch.cat([self.enorm(embedded[:, 1:]), self.hnorm(x_BTH)], -1))
        y_BTH = self.mtp_norm(self.mtp_layer(y_BTH, self.cos[1 : window + 1], self.sin[1 : window + 1]))
        return F.linear(x_BTH, self.embedding.weight), F.linear(y_BTH, self.embedding.weight)

    def losses(self, tokens_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy in nats of the main and of the MTP prediction; `tokens_BX` as in forward."""
        main_BTW, mtp_BTW = self(tokens_BX)
        return _cross_entropy(main_BTW, tokens_BX[:, 1:-1]), _cross_entropy(mtp_BTW, tokens_BX[:, 2:])

    def moe_layers(self) -> list[MoE]:
        """All routed layers, the MTP layer's included."""
        return [module for module in self.modules() if isinstance(module, MoE)]


def _cross_entropy(logits_BTW: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTW.float().flatten(0, 1), targets_BT.flatten())
