"""A decoder's layers as one op: where every part is compiled they run as one call, recorded once (csrc/program.c)."""

# Shape suffixes: T = rows, H = hidden

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pegahpc.kernels import native
from pegahpc.kernels.native_layers import NativeOp, Packer
from pegahpc.kernels.native_ops import latent_attention_native, rms_norm_native, runs
from pegahpc.kernels.registry import register

if TYPE_CHECKING:
    from pegahpc.kernels.selected import PlainOps

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
MadeOp = Any
"""A made op: any callable, and where it is compiled a NativeOp."""


class Exchanging(Protocol):
    """A rank's exchanges, as C code makes them (moe/exchanges.py)."""

    @property
    def fabric(self) -> ctypes.Structure:
        """`struct fabric` of ops.h."""
        ...

    @property
    def addresses(self) -> list[int]:
        """Of order, sent, counts and words, as fabric.c has them."""
        ...

    @property
    def max_pairs(self) -> int:
        """(row, expert) pairs that this rank may send in one exchange."""
        ...

    @property
    def max_received(self) -> int:
        """Rows that may arrive in one exchange."""
        ...

    @property
    def chain(self) -> Any:
        """Its `own` is this rank's word of the step."""
        ...

    def heard(self, status: int) -> None:
        """All exchanges of a step are over, or have failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class MoEOps:
    """An MoE layer's made ops, and how its rank exchanges; None where C code cannot."""

    router: MadeOp
    experts: MadeOp
    output: MadeOp
    exchanges: Exchanging | None
    load: npt.NDArray[np.int64]  # rows of each local expert so far, then the experts seen
    num_topk: int


@dataclass(frozen=True, kw_only=True)
class LayerOps:
    """One decoder layer: two norms, latent attention, and a SwiGLU or an MoE."""

    input_norm_H: torch.Tensor
    project: MadeOp
    output: MadeOp
    scale: float  # of the softmax
    post_attention_norm_H: torch.Tensor
    ffn: MadeOp | MoEOps


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """Rows of a step that attend together: all decode rows (a context each), or one span's rows (one context)."""

    first_row: int
    num_rows: int
    block_idx_GP: torch.Tensor  # [1 or num_rows, pages], int64: page * num_layers
    seq_lens_T: torch.Tensor  # [num_rows], int64: tokens that each row sees, itself included


class _Context(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _INT) for name in ("first_row", "num_rows", "block_stride")),
        *((name, _POINTER) for name in ("block_idx", "seq_lens")),
    ]


class _Step(ctypes.Structure):
    """`struct step` of program.c, field by field."""

    _fields_: ClassVar = [
        *((name, _INT) for name in ("num_rows", "num_live", "hidden", "num_topk", "word", "page_tokens")),
        *(("num_contexts", _INT), ("contexts", ctypes.POINTER(_Context))),
        *((name, _POINTER) for name in ("cis", "row_idx", "slab", "residual", "x", "out", "q", "attended", "topk_idx")),
        *((name, _POINTER) for name in ("topk_weights", "y", "rows", "outputs")),
        *((name, _POINTER) for name in ("order", "sent", "counts", "words", "sizes", "scratch")),
    ]


class _Node(ctypes.Structure):
    _fields_: ClassVar = [("run", _POINTER), ("op", _POINTER)]


class _Norm(ctypes.Structure):
    _fields_: ClassVar = [("weight", _POINTER), ("eps", ctypes.c_float)]


class _Attention(ctypes.Structure):
    _fields_: ClassVar = [("project", _POINTER), ("output", _POINTER), ("layer", _INT), ("scale", ctypes.c_float)]


class _MoE(ctypes.Structure):
    _fields_: ClassVar = [(name, _POINTER) for name in ("router", "experts", "shared", "fabric", "load")]


@register("program", "parts")
def program_parts(_: PlainOps, *, layers: Sequence[LayerOps], eps: float) -> None:
    """None: the decoder calls layer by layer."""


@register("program", "native", priority=20, supports=runs)
def program_native(parts: PlainOps, *, layers: Sequence[LayerOps], eps: float) -> Program | None:
    """The layers as one call; None where an op among them is not the compiled one, or the exchanges are not."""
    moes = [layer.ffn for layer in layers if isinstance(layer.ffn, MoEOps)]
    ops = [op for layer in layers for op in (layer.project, layer.output)]
    ops += [layer.ffn for layer in layers if not isinstance(layer.ffn, MoEOps)]
    ops += [op for moe in moes for op in (moe.router, moe.experts, moe.output)]
    is_compiled = parts.rms_norm is rms_norm_native and parts.latent_attention is latent_attention_native
    is_compiled = is_compiled and all(isinstance(op, NativeOp) for op in ops)
    return Program(layers, eps) if is_compiled and moes and all(moe.exchanges for moe in moes) else None


class Program:
    """Compiled layers with their buffers, which grow with the rows of a step.

    Args:
        layers: all their ops are compiled.
    """

    def __init__(self, layers: Sequence[LayerOps], eps: float) -> None:
        library = native.library()
        assert library is not None
        self._library, self._layers = library, list(layers)  # their weights must live
        self._norms = Packer()
        self._held: list[object] = []
        self._nodes: list[_Node] = []
        for number, layer in enumerate(layers):
            self._half("attention", layer.input_norm_H, self._attention(number, layer), eps)
            self._half(*self._ffn(layer.ffn, post_norm_H=layer.post_attention_norm_H), eps)
        self._program = (_Node * len(self._nodes))(*self._nodes)
        moes = [layer.ffn for layer in layers if isinstance(layer.ffn, MoEOps)]
        (self._exchanges,) = {moe.exchanges for moe in moes if moe.exchanges}  # buffers serve all layers
        (self._num_topk,) = {moe.num_topk for moe in moes}
        (num_local,) = {len(moe.load) - 1 for moe in moes}
        self._sizes = np.zeros(num_local, np.int64)
        self._step, self._capacity = _Step(), -1

    def __call__(
        self,
        residual_TH: torch.Tensor,
        num_live: int,
        *,
        cis_TR: torch.Tensor,
        row_idx_T: torch.Tensor,
        slab: torch.Tensor,
        contexts: Sequence[RowContext],
    ) -> None:
        """Run all layers over residual_TH [num_rows, hidden], in place; the rows' latents go to the slab.

        Raises:
            What `Exchanging.heard` raises.
        """
        num_rows, step = residual_TH.shape[0], self._step
        assert num_live <= num_rows and num_live * self._num_topk <= self._exchanges.max_pairs
        assert slab.shape[1] == len(self._layers)
        if num_rows > self._capacity:
            self._grow(num_rows, residual_TH.shape[1])
        held = [
            _Context(c.first_row, c.num_rows, c.block_idx_GP.stride(0) if c.block_idx_GP.shape[0] > 1 else 0,
                     c.block_idx_GP.data_ptr(), c.seq_lens_T.data_ptr())
            for c in contexts
        ]  # fmt: skip
        step.num_rows, step.num_live, step.word = num_rows, num_live, self._exchanges.chain.own
        step.page_tokens, step.num_contexts = slab.shape[2], len(held)
        step.contexts = (_Context * len(held))(*held)
        step.cis, step.row_idx, step.slab = cis_TR.data_ptr(), row_idx_T.data_ptr(), slab.data_ptr()
        step.residual = residual_TH.data_ptr()
        self._exchanges.heard(self._library.run_program(self._program, len(self._program), ctypes.byref(step)))

    def _half(self, kind: str, norm_H: torch.Tensor, op: object, eps: float) -> None:
        """norm, then an op, then the sum with what came in."""
        self._node("norm", _Norm(self._norms.vector(norm_H), eps))
        self._node(kind, op)
        self._node("add", None)

    def _node(self, kind: str, op: Any) -> None:
        self._held.append(op)
        run = ctypes.cast(getattr(self._library, f"node_{kind}"), _POINTER)
        self._nodes.append(_Node(run, None if op is None else ctypes.addressof(op)))

    def _attention(self, number: int, layer: LayerOps) -> _Attention:
        return _Attention(layer.project.at, layer.output.at, number, layer.scale)

    def _ffn(self, ffn: MadeOp | MoEOps, *, post_norm_H: torch.Tensor) -> tuple[str, torch.Tensor, object]:
        if not isinstance(ffn, MoEOps):
            return "swiglu", post_norm_H, ffn.op
        fabric = ctypes.addressof(ffn.exchanges.fabric) if ffn.exchanges else None
        return "moe", post_norm_H, _MoE(ffn.router.at, ffn.experts.at, ffn.output.at, fabric, ffn.load.ctypes.data)

    def _grow(self, num_rows: int, hidden: int) -> None:
        """Buffers for so many rows; pages that no step touches are never made."""
        self._capacity = num_rows
        num_pairs, step = num_rows * self._num_topk, self._step
        received = self._exchanges.max_received
        project = [layer.project.op for layer in self._layers]
        widths = {
            "x": num_rows * hidden,
            "out": num_rows * hidden,
            "q": num_rows * max(op.num_heads * (op.latent + op.rotary) for op in project),
            "attended": num_rows * max(op.num_heads * op.latent for op in project),
            "topk_weights": num_pairs,
            "y": num_pairs * hidden,
            "rows": received * hidden,
            "outputs": received * hidden,
            "scratch": max(self._scratch(layer, num_rows, received) for layer in self._layers),
        }
        buffers: dict[str, torch.Tensor] = {name: torch.empty(size) for name, size in widths.items()}
        buffers["topk_idx"] = torch.empty(num_pairs, dtype=torch.int64)
        self._buffers = buffers
        for name, buffer in buffers.items():
            setattr(step, name, buffer.data_ptr())
        step.order, step.sent, step.counts, step.words = self._exchanges.addresses
        step.sizes, step.hidden, step.num_topk = self._sizes.ctypes.data, hidden, self._num_topk

    @staticmethod
    def _scratch(layer: LayerOps, num_rows: int, received: int) -> int:
        ops = [layer.project, layer.output]
        if not isinstance(layer.ffn, MoEOps):
            return num_rows * max(int(op.per_row) for op in (*ops, layer.ffn))
        ops += [layer.ffn.router, layer.ffn.output]
        return max(num_rows * max(int(op.per_row) for op in ops), received * int(layer.ffn.experts.per_row))
