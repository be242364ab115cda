"""The dense SwiGLU FFN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegahpc.kernels.program import MadeOp
from pegahpc.kernels.selected import Kernels


@dataclass(frozen=True, kw_only=True)
class DenseWeights:
    """Matrices stored [in, out]; gate first."""

    gate_up_HI: torch.Tensor
    down_IH: torch.Tensor


class DenseFFN:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: DenseWeights, kernels: Kernels) -> None:
        self._swiglu = kernels.swiglu(gate_up_HW=weights.gate_up_HI, down_WH=weights.down_IH)

    @property
    def ops(self) -> MadeOp:
        """What a program is recorded from."""
        return self._swiglu

    def forward(self, x_TH: torch.Tensor, num_live: int) -> torch.Tensor:
        """[num_rows, hidden] to the same; padding rows are rows like others here."""
        out_TH: torch.Tensor = self._swiglu(x_TH)
        return out_TH
