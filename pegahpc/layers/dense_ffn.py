"""The dense SwiGLU FFN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegahpc.kernels.selected import Kernels


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """Matrices stored [in, out]; gate first."""

    gate_up_HI: torch.Tensor
    down_IH: torch.Tensor


class DenseFFN:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: DenseWeights, kernels: Kernels) -> None:
        self.weights = weights
        self.kernels = kernels

    def forward(self, x_TH: torch.Tensor, num_live: int) -> torch.Tensor:
        """[num_rows, hidden] to the same; padding rows are rows like others here."""
        gate_up_TI = self.kernels.matmul_rows(x_TH, self.weights.gate_up_HI)
        out_TH: torch.Tensor = self.kernels.matmul_rows(self.kernels.silu_and_mul(gate_up_TI), self.weights.down_IH)
        return out_TH
