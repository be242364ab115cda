"""The MoE layer: route, dispatch, grouped experts, combine, and the shared expert beside them."""

# Shape suffixes: T = rows of the step, L = live rows, H = hidden, K = experts a row, E = local experts, I = width

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegahpc.kernels.packed_experts import PackedExperts
from pegahpc.kernels.program import MoEOps
from pegahpc.kernels.registry import Kernel
from pegahpc.kernels.selected import Kernels
from pegahpc.moe.dispatch import Dispatcher
from pegahpc.moe.expert_load import ExpertLoad
from pegahpc.moe.shape import RouterShape


@dataclass(frozen=True, kw_only=True)
class MoEWeights:
    """One layer's weights on one rank, matrices stored [in, out]."""

    gate_HE: torch.Tensor  # float32, all experts
    bias_E: torch.Tensor | None  # float32, e_score_correction_bias
    gate_up_EHI: torch.Tensor | None  # this rank's experts: [num_local_experts, hidden, 2 * width], gate first
    down_EIH: torch.Tensor | None  # [num_local_experts, width, hidden]
    shared_gate_up_HI: torch.Tensor | None
    shared_down_IH: torch.Tensor | None
    packed: PackedExperts | None = None  # this rank's experts as the checkpoint packs them, instead of the tensors


class MoELayer:
    """out = shared(x) + sum over chosen experts of weight * expert(x), the sum in float32 and ascending expert id."""

    def __init__(self, shape: RouterShape, weights: MoEWeights, kernels: Kernels, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.load = ExpertLoad(dispatcher.num_local_experts)
        self._num_topk = shape.num_topk
        self._route = kernels.router(gate_HE=weights.gate_HE, bias_E=weights.bias_E, **shape.arguments)
        self._experts = _experts(weights, kernels)
        self._output = kernels.moe_output(
            shared_gate_up_HW=weights.shared_gate_up_HI, shared_down_WH=weights.shared_down_IH
        )

    def forward(self, x_TH: torch.Tensor, num_live: int) -> torch.Tensor:
        """[num_rows, hidden] to the same; rows from num_live on are padding and are sent nowhere.

        Every rank calls this in every step, also with num_live 0: the exchanges are part of the chain.
        """
        if not x_TH.shape[0]:
            self._exchange(x_TH, _NO_CHOICE)
            return x_TH
        topk_idx_TK, topk_weights_TK = self._route(x_TH)
        y_LKH = self._exchange(x_TH[:num_live], topk_idx_TK[:num_live])
        out_TH: torch.Tensor = self._output(x_TH, y_LKH, topk_weights_TK[:num_live])
        return out_TH

    @property
    def ops(self) -> MoEOps:
        """What a program is recorded from."""
        return MoEOps(
            router=self._route,
            experts=self._experts,
            output=self._output,
            exchanges=self.dispatcher.exchanges,
            load=self.load.counts,
            num_topk=self._num_topk,
        )

    def _exchange(self, x_LH: torch.Tensor, topk_idx_LK: torch.Tensor) -> torch.Tensor:
        """Rows to their experts, this rank's experts over whatever arrives, outputs home: [L, K, H]."""
        received = self.dispatcher.dispatch(x_LH, topk_idx_LK)
        if received.rows_QH.shape[0]:
            self.load.count(received.group_sizes)
        return self.dispatcher.combine(self._experts(received.rows_QH, received.group_sizes), received)


def _experts(weights: MoEWeights, kernels: Kernels) -> Kernel:
    """(rows, group_sizes) -> the rows through their experts."""
    if (packed := weights.packed) is not None:
        return lambda x_RH, group_sizes: kernels.grouped_swiglu_packed(x_RH, packed, group_sizes)
    made: Kernel = kernels.experts(gate_up_EHW=weights.gate_up_EHI, down_EWH=weights.down_EIH)
    return made


_NO_CHOICE = torch.empty(0, 1, dtype=torch.int64)
