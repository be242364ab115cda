"""The `native` backends: kernels/csrc/cpu.c behind the registry's signatures. Float32, CPU, one thread.

A tensor whose pointer is passed must have a name here until the call returns, or its memory is free by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from pegahpc.kernels import native
from pegahpc.kernels.registry import Place, register


def runs(place: Place) -> bool:
    """Whether the compiled kernels serve this place."""
    is_plain = place.device.type == "cpu" and place.dtype == torch.float32 and place.num_threads == 1
    return is_plain and native.library() is not None


@cache
def _function(name: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(native.library(), name)
    return function


def _call(name: str, *arguments: object) -> None:
    _function(name)(*arguments)


@register("rms_norm", "native", priority=20, supports=runs)
def rms_norm_native(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows may be strided; a row is dense."""
    num_rows, hidden = x_TH.shape
    out_TH = x_TH.new_empty(num_rows, hidden)
    _call("rms_norm", x_TH.data_ptr(), x_TH.stride(0), weight_H.data_ptr(), out_TH.data_ptr(), num_rows, hidden, eps)
    return out_TH


@register("matmul_rows", "native", priority=8, supports=runs)
def matmul_rows_native(x_TI: torch.Tensor, w_IO: torch.Tensor) -> torch.Tensor:
    """Row-invariant by construction; a little slower than a tuned BLAS."""
    num_rows, num_in = x_TI.shape
    out_TO = x_TI.new_empty(num_rows, w_IO.shape[1])
    pointers = (x_TI.data_ptr(), x_TI.stride(0), w_IO.data_ptr(), out_TO.data_ptr())
    _call("matmul_rows", *pointers, num_rows, num_in, w_IO.shape[1])
    return out_TO


@register("silu_and_mul", "native", priority=20, supports=runs)
def silu_and_mul_native(gate_up_TI: torch.Tensor) -> torch.Tensor:
    gate_up_TI = gate_up_TI.contiguous()
    num_rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = gate_up_TI.new_empty(num_rows, width)
    _call("silu_and_mul", gate_up_TI.data_ptr(), out_TI.data_ptr(), num_rows, width)
    return out_TI


@register("grouped_swiglu", "native", priority=20, supports=runs)
def grouped_swiglu_native(
    x_RH: torch.Tensor, gate_up_EHI: torch.Tensor, down_EIH: torch.Tensor, group_sizes: list[int]
) -> torch.Tensor:
    """One call for all experts of a layer; empty groups cost nothing."""
    num_experts, width, hidden = down_EIH.shape
    out_RH = torch.empty_like(x_RH)
    scratch = x_RH.new_empty(max(group_sizes) * 3 * width)
    sizes = torch.tensor(group_sizes)
    tensors = (x_RH, gate_up_EHI, down_EIH, sizes, out_RH, scratch)
    _call("grouped_swiglu", *(tensor.data_ptr() for tensor in tensors), num_experts, hidden, width)
    return out_RH


@register("latent_attention", "native", priority=20, supports=runs)
def latent_attention_native(
    q_TND: torch.Tensor,
    rows_XPD: torch.Tensor,
    block_idx_GP: torch.Tensor,
    seq_lens_T: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """Reads the pages where they lie, and only what each row sees."""
    num_rows, num_heads, dim = q_TND.shape
    out_TNC = q_TND.new_empty(num_rows, num_heads, kv_lora_rank)
    block_stride = block_idx_GP.stride(0) if block_idx_GP.shape[0] == num_rows else 0
    _call(
        "latent_attention",
        q_TND.data_ptr(),
        rows_XPD.data_ptr(),
        block_idx_GP.data_ptr(),
        block_stride,
        seq_lens_T.data_ptr(),
        out_TNC.data_ptr(),
        num_rows,
        num_heads,
        dim,
        kv_lora_rank,
        rows_XPD.shape[1],
        scale,
    )
    return out_TNC


@register("latent_rows", "native", priority=20, supports=runs)
def latent_rows_native(
    q_TNX: torch.Tensor,
    absorbed_NTC: torch.Tensor,
    latent_TC: torch.Tensor,
    k_pe_TR: torch.Tensor,
    cis_TR: torch.Tensor,
    cache_YD: torch.Tensor,
    row_idx_T: torch.Tensor,
) -> torch.Tensor:
    q_TNX, absorbed_NTC = q_TNX.contiguous(), absorbed_NTC.contiguous()
    num_heads, num_rows, latent = absorbed_NTC.shape
    rotary = cis_TR.shape[1]
    out_TND = q_TNX.new_empty(num_rows, num_heads, latent + rotary)
    _call(
        "latent_rows",
        q_TNX.data_ptr(),
        absorbed_NTC.data_ptr(),
        latent_TC.data_ptr(),
        k_pe_TR.data_ptr(),
        k_pe_TR.stride(0),
        cis_TR.data_ptr(),
        cache_YD.data_ptr(),
        row_idx_T.data_ptr(),
        out_TND.data_ptr(),
        num_rows,
        num_heads,
        q_TNX.shape[2] - rotary,
        latent,
        rotary,
    )
    return out_TND


@register("route_tokens", "native", priority=20, supports=runs)
def route_tokens_native(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    *,
    scoring: str,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    group_best: int,
    norm_topk_prob: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_experts = logits_TE.shape
    topk_idx_TK = torch.empty(num_rows, num_topk, dtype=torch.int64)
    topk_weights_TK = logits_TE.new_empty(num_rows, num_topk)
    _call(
        "route_tokens",
        logits_TE.data_ptr(),
        bias_E.data_ptr() if bias_E is not None else None,
        topk_idx_TK.data_ptr(),
        topk_weights_TK.data_ptr(),
        num_rows,
        num_experts,
        num_topk,
        num_groups,
        num_topk_groups,
        group_best,
        scoring == "sigmoid",
        norm_topk_prob,
        scale,
    )
    return topk_idx_TK, topk_weights_TK


@register("weighted_sum", "native", priority=20, supports=runs)
def weighted_sum_native(y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    num_rows, num_topk, hidden = y_TKH.shape
    out_TH = y_TKH.new_empty(num_rows, hidden)
    pointers = (y_TKH.data_ptr(), weights_TK.data_ptr(), out_TH.data_ptr())
    _call("weighted_sum", *pointers, num_rows, num_topk, hidden)
    return out_TH
