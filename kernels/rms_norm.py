"""RMSNorm: y = x / rms(x) * weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from pegahpc.kernels.registry import register


@register("rms_norm", "torch")
def rms_norm_torch(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Statistics in float32 whatever the dtype of x; the normalised row is rounded before the weight multiplies it.

    Source: DeepseekV3RMSNorm of transformers 5.24 (two roundings, which decide token parity in bfloat16).
    """
    x32_TH = x_TH.float()
    scale_T1 = torch.rsqrt(x32_TH.square().mean(-1, keepdim=True) + eps)
    return (x32_TH * scale_T1).to(x_TH.dtype) * weight_H


@register("rms_norm", "aten", priority=10, supports=lambda place: place.dtype == torch.float32)
def rms_norm_aten(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """One fused call; in float32 there is no second rounding to keep."""
    return functional.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)
