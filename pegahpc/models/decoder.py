"""The one decoder: embed, layers of (norm, mixer, residual, norm, FFN, residual), final norm, head."""

# Shape suffixes: T = rows of the step, H = hidden, V = vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pegahpc.kernels.program import LayerOps, MadeOp, MoEOps, Program
from pegahpc.kernels.selected import Kernels
from pegahpc.mla.attention import AttentionStep, LatentAttention, LayerCache


class FFN(Protocol):
    """Dense or MoE."""

    @property
    def ops(self) -> MadeOp | MoEOps:
        """What a program is recorded from."""
        ...

    def forward(self, x_TH: torch.Tensor, num_live: int) -> torch.Tensor:
        """[num_rows, hidden] to the same."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer with pre-norm residuals."""

    attention: LatentAttention
    ffn: FFN
    input_norm_H: torch.Tensor
    post_attention_norm_H: torch.Tensor

    @property
    def ops(self) -> LayerOps:
        """What a program is recorded from."""
        return LayerOps(
            input_norm_H=self.input_norm_H,
            project=self.attention.project,
            output=self.attention.output,
            scale=self.attention.shape.softmax_scale,
            post_attention_norm_H=self.post_attention_norm_H,
            ffn=self.ffn.ops,
        )


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """The tensors of one step; rows from num_live on are padding (token 0, position 0, page 0)."""

    token_ids_T: torch.Tensor  # int64
    num_live: int
    attention: AttentionStep


class Decoder:
    """One forward serves prefill, decode, verify and padding."""

    def __init__(
        self,
        *,
        embed_VH: torch.Tensor,
        layers: tuple[Layer, ...],
        final_norm_H: torch.Tensor,
        head_HV: torch.Tensor,
        rms_norm_eps: float,
        kernels: Kernels,
    ) -> None:
        self.embed_VH = embed_VH
        self.layers = layers
        self.final_norm_H = final_norm_H
        self.rms_norm_eps = rms_norm_eps
        self._norm = kernels.rms_norm
        self._head = kernels.linear(w_IO=head_HV)
        self._program: Program | None = kernels.program(layers=[layer.ops for layer in layers], eps=rms_norm_eps)

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> torch.Tensor:
        """[num_rows, hidden] after the last layer, before the final norm; writes the step's rows to the cache."""
        norm, eps = self._norm, self.rms_norm_eps
        hidden_TH = self.embed_VH.index_select(0, step.token_ids_T)
        if self._program is not None:
            shared = step.attention
            self._program(hidden_TH, step.num_live, cis_TR=shared.cis_TR, row_idx_T=shared.row_idx_T,
                          slab=caches[0].slab, contexts=shared.contexts)  # fmt: skip
            return hidden_TH
        for layer, cache in zip(self.layers, caches, strict=True):
            if step.attention.contexts:  # a rank without rows has nobody to attend for; it still comes to the experts
                x_TH = norm(hidden_TH, layer.input_norm_H, eps)
                hidden_TH = hidden_TH + layer.attention.forward(x_TH, step.attention, cache)
            x_TH = norm(hidden_TH, layer.post_attention_norm_H, eps)
            hidden_TH = hidden_TH + layer.ffn.forward(x_TH, step.num_live)
        return hidden_TH

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] to [num_rows, vocab], float32."""
        normed_TH = self._norm(hidden_TH, self.final_norm_H, self.rms_norm_eps)
        logits_TV: torch.Tensor = self._head(normed_TH).float()
        return logits_TV
