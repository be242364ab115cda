"""The made ops (linear.py) in C: weights packed once, one call each. Float32, CPU, one thread.

A tensor whose pointer is passed must have a name here until the call returns, or its memory is free by then.
"""

# Shape suffixes: as in linear.py, latent_layer.py and moe_layer.py

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pegahpc.kernels import native
from pegahpc.kernels.native_ops import function, runs
from pegahpc.kernels.registry import Kernel, register

if TYPE_CHECKING:
    from pegahpc.kernels.selected import PlainOps

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Packed(ctypes.Structure):
    """`struct packed` of linear.h."""

    _fields_: ClassVar = [("data", _POINTER), ("num_in", _INT), ("num_out", _INT), ("is_bfloat16", _INT)]


class Swiglu(ctypes.Structure):
    """`struct swiglu` of moe.c."""

    _fields_: ClassVar = [("gate_up", Packed), ("down", Packed)]


class LatentProject(ctypes.Structure):
    """`struct latent_project` of latent.c."""

    _fields_: ClassVar = [
        *(("qkv_a", Packed), ("q_b", Packed), ("w_uk", ctypes.POINTER(Packed))),
        *((name, _POINTER) for name in ("q_a_norm", "kv_a_norm")),
        *((name, _INT) for name in ("num_heads", "nope", "latent", "rotary")),
        ("eps", ctypes.c_float),
    ]


class LatentOutput(ctypes.Structure):
    """`struct latent_output` of latent.c."""

    _fields_: ClassVar = [
        *(("o_proj", Packed), ("w_uv", ctypes.POINTER(Packed))),
        *((name, _INT) for name in ("num_heads", "latent", "value")),
    ]


class Router(ctypes.Structure):
    """`struct router` of moe.c."""

    _fields_: ClassVar = [
        *(("gate", Packed), ("bias", _POINTER)),
        *((name, _INT) for name in ("num_topk", "num_groups", "num_topk_groups", "best_of", "is_sigmoid", "norm")),
        ("scale", ctypes.c_float),
    ]


class Packer:
    """Packs an op's weights, and holds their memory for as long as the op holds this."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        library = native.library()
        assert library is not None
        self._library = library

    def pack(self, w_IO: torch.Tensor | None) -> Packed:
        """One matrix; None gives one without rows. As bfloat16 where that loses nothing: half the bytes to read."""
        if w_IO is None:
            return Packed(None, 0, 0, 0)
        w_IO = w_IO.float().contiguous()
        is_bfloat16 = bool(torch.equal(w_IO.bfloat16().float(), w_IO))
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        panels = torch.empty(self._library.packed_elements(*w_IO.shape), dtype=dtype)
        self._library.pack(w_IO.data_ptr(), panels.data_ptr(), *w_IO.shape, is_bfloat16)
        return Packed(self._hold(panels), *w_IO.shape, is_bfloat16)

    def pack_all(self, w_NIO: torch.Tensor) -> ctypes.Array[Packed]:
        """One matrix after the other."""
        return (Packed * w_NIO.shape[0])(*(self.pack(w_IO) for w_IO in w_NIO))

    def vector(self, weight: torch.Tensor | None) -> int | None:
        """The address of its values, float32 one after the other."""
        return None if weight is None else self._hold(weight.float().contiguous())

    def _hold(self, tensor: torch.Tensor) -> int:
        """Its address, valid from now on."""
        self._held.append(tensor)
        return tensor.data_ptr()


class NativeOp:
    """A compiled op with its weights: to be called by itself, or to be a part of a program (program.py).

    Args:
        op: the struct that C code reads.
        packer: holds the memory of its weights.
        per_row: floats of scratch that a row takes.
    """

    def __init__(self, op: Any, packer: Packer, per_row: int, run: Kernel) -> None:
        self.op, self._packer, self.per_row = op, packer, per_row
        self.at: int | None = None if op is None else ctypes.addressof(op)
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)


@register("linear", "native", priority=20, supports=runs)
def linear_native(_: PlainOps, *, w_IO: torch.Tensor) -> Kernel:
    packer = Packer()
    packed, call, num_out = packer.pack(w_IO), function("linear"), w_IO.shape[1]
    at = ctypes.addressof(packed)

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        x_TI, (num_rows, num_in) = x_TI.contiguous(), x_TI.shape
        out_TO = x_TI.new_empty(num_rows, num_out)
        call(at, x_TI.data_ptr(), num_in, out_TO.data_ptr(), num_out, num_rows)
        return out_TO

    return NativeOp(packed, packer, 0, linear)


@register("swiglu", "native", priority=20, supports=runs)
def swiglu_native(_: PlainOps, *, gate_up_HW: torch.Tensor, down_WH: torch.Tensor) -> Kernel:
    packer = Packer()
    packed, call = Swiglu(packer.pack(gate_up_HW), packer.pack(down_WH)), function("swiglu")
    at, per_row = ctypes.addressof(packed), gate_up_HW.shape[1] + down_WH.shape[0]

    def swiglu(x_TH: torch.Tensor) -> torch.Tensor:
        x_TH, num_rows = x_TH.contiguous(), x_TH.shape[0]
        out_TH, scratch = torch.empty_like(x_TH), x_TH.new_empty(num_rows * per_row)
        call(at, x_TH.data_ptr(), scratch.data_ptr(), out_TH.data_ptr(), num_rows)
        return out_TH

    return NativeOp(packed, packer, per_row, swiglu)


@register("latent_project", "native", priority=20, supports=runs)
def latent_project_native(
    _: PlainOps,
    *,
    qkv_a_HX: torch.Tensor,
    q_a_norm: torch.Tensor | None,
    q_b: torch.Tensor | None,
    kv_a_norm_C: torch.Tensor,
    w_uk_NPC: torch.Tensor,
    rotary: int,
    eps: float,
) -> Kernel:
    packer, call = Packer(), function("latent_project")
    num_heads, nope, latent = w_uk_NPC.shape
    packed = LatentProject(
        packer.pack(qkv_a_HX), packer.pack(q_b), packer.pack_all(w_uk_NPC), packer.vector(q_a_norm),
        packer.vector(kv_a_norm_C), num_heads, nope, latent, rotary, eps,
    )  # fmt: skip
    at, per_row = ctypes.addressof(packed), qkv_a_HX.shape[1] + (sum(q_b.shape) if q_b is not None else 0)

    def project(
        x_TH: torch.Tensor, cis_TR: torch.Tensor, cache_YD: torch.Tensor, row_idx_T: torch.Tensor
    ) -> torch.Tensor:
        x_TH, num_rows = x_TH.contiguous(), x_TH.shape[0]
        q_TND, scratch = x_TH.new_empty(num_rows, num_heads, latent + rotary), x_TH.new_empty(num_rows * per_row)
        tensors = (x_TH, cis_TR, cache_YD, row_idx_T, scratch, q_TND)
        call(at, *[tensor.data_ptr() for tensor in tensors], num_rows)
        return q_TND

    return NativeOp(packed, packer, per_row, project)


@register("latent_output", "native", priority=20, supports=runs)
def latent_output_native(_: PlainOps, *, w_uv_NCV: torch.Tensor, o_proj: torch.Tensor) -> Kernel:
    packer, call = Packer(), function("latent_output")
    packed = LatentOutput(packer.pack(o_proj), packer.pack_all(w_uv_NCV), *w_uv_NCV.shape)
    at, (per_row, hidden) = ctypes.addressof(packed), o_proj.shape

    def output(out_TNC: torch.Tensor) -> torch.Tensor:
        out_TNC, num_rows = out_TNC.contiguous(), out_TNC.shape[0]
        out_TH, scratch = out_TNC.new_empty(num_rows, hidden), out_TNC.new_empty(num_rows * per_row)
        call(at, out_TNC.data_ptr(), scratch.data_ptr(), out_TH.data_ptr(), num_rows)
        return out_TH

    return NativeOp(packed, packer, per_row, output)


@register("router", "native", priority=20, supports=runs)
def router_native(
    _: PlainOps,
    *,
    gate_HE: torch.Tensor,
    bias_E: torch.Tensor | None,
    scoring: str,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    group_best: int,
    norm_topk_prob: bool,
    scale: float,
) -> Kernel:
    packer, call, num_experts = Packer(), function("route"), gate_HE.shape[1]
    packed = Router(
        packer.pack(gate_HE), packer.vector(bias_E), num_topk, num_groups, num_topk_groups, group_best,
        scoring == "sigmoid", norm_topk_prob, scale,
    )  # fmt: skip
    at = ctypes.addressof(packed)

    def route(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH, num_rows = x_TH.contiguous(), x_TH.shape[0]
        scratch, topk_weights_TK = x_TH.new_empty(num_rows * num_experts), x_TH.new_empty(num_rows, num_topk)
        topk_idx_TK = torch.empty(num_rows, num_topk, dtype=torch.int64)
        tensors = (x_TH, scratch, topk_idx_TK, topk_weights_TK)
        call(at, *[tensor.data_ptr() for tensor in tensors], num_rows)
        return topk_idx_TK, topk_weights_TK

    return NativeOp(packed, packer, num_experts, route)


@register("experts", "native", priority=20, supports=runs)
def experts_native(_: PlainOps, *, gate_up_EHW: torch.Tensor, down_EWH: torch.Tensor) -> Kernel:
    packer, call, num_experts = Packer(), function("experts"), gate_up_EHW.shape[0]
    packed = (Swiglu * num_experts)(
        *(Swiglu(packer.pack(gate_up), packer.pack(down)) for gate_up, down in zip(gate_up_EHW, down_EWH, strict=True))
    )
    at, per_row, sizes_type = ctypes.addressof(packed), gate_up_EHW.shape[2] + down_EWH.shape[1], _INT * num_experts

    def experts(x_RH: torch.Tensor, group_sizes: Sequence[int]) -> torch.Tensor:
        x_RH = x_RH.contiguous()
        out_RH, scratch = torch.empty_like(x_RH), x_RH.new_empty(max(group_sizes) * per_row)
        sizes = sizes_type(*group_sizes)
        call(at, x_RH.data_ptr(), ctypes.addressof(sizes), scratch.data_ptr(), out_RH.data_ptr(), num_experts)
        return out_RH

    return NativeOp(packed, packer, per_row, experts)


@register("moe_output", "native", priority=20, supports=runs)
def moe_output_native(
    _: PlainOps, *, shared_gate_up_HW: torch.Tensor | None, shared_down_WH: torch.Tensor | None
) -> Kernel:
    packer, call = Packer(), function("moe_output")
    packed, at, per_row = None, None, 0
    if shared_gate_up_HW is not None and shared_down_WH is not None:
        packed = Swiglu(packer.pack(shared_gate_up_HW), packer.pack(shared_down_WH))
        at, per_row = ctypes.addressof(packed), shared_gate_up_HW.shape[1] + shared_down_WH.shape[0]

    def output(x_TH: torch.Tensor, y_LKH: torch.Tensor, topk_weights_LK: torch.Tensor) -> torch.Tensor:
        x_TH, y_LKH, (num_rows, hidden) = x_TH.contiguous(), y_LKH.contiguous(), x_TH.shape
        topk_weights_LK = topk_weights_LK.contiguous()
        out_TH, scratch = torch.empty_like(x_TH), x_TH.new_empty(num_rows * per_row)
        tensors = (x_TH, y_LKH, topk_weights_LK, scratch, out_TH)
        call(at, *[tensor.data_ptr() for tensor in tensors], num_rows, *y_LKH.shape[:2], hidden)
        return out_TH

    return NativeOp(packed, packer, per_row, output)
