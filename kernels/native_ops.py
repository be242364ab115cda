"""The plain ops in C behind the registry's signatures. Float32, CPU, one thread. Made ops are in native_layers.py.

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
def function(name: str) -> Callable[..., None]:
    """One function of the library."""
    found: Callable[..., None] = getattr(native.library(), name)
    return found


def _call(name: str, *arguments: object) -> None:
    function(name)(*arguments)


@register("rms_norm", "native", priority=20, supports=runs)
def rms_norm_native(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows may be strided; a row is dense."""
    num_rows, hidden = x_TH.shape
    out_TH = x_TH.new_empty(num_rows, hidden)
    _call("rms_norm", x_TH.data_ptr(), x_TH.stride(0), weight_H.data_ptr(), out_TH.data_ptr(), num_rows, hidden, eps)
    return out_TH


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
