"""The kernels of one engine: each op's function, chosen once for its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

# Importing a module registers its implementations.
import pegahpc.kernels.grouped_swiglu
import pegahpc.kernels.latent_attention
import pegahpc.kernels.latent_layer
import pegahpc.kernels.latent_rows
import pegahpc.kernels.linear
import pegahpc.kernels.matmul_heads
import pegahpc.kernels.matmul_rows
import pegahpc.kernels.moe_layer
import pegahpc.kernels.native_layers
import pegahpc.kernels.native_ops
import pegahpc.kernels.packed_experts
import pegahpc.kernels.program
import pegahpc.kernels.rms_norm
import pegahpc.kernels.route_tokens
import pegahpc.kernels.swiglu  # noqa: F401
from pegahpc.kernels.registry import Kernel, Place, choose, select

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlainOps:
    """One function an op; the signatures stand in the modules of that name."""

    grouped_swiglu: Kernel
    grouped_swiglu_packed: Kernel
    latent_attention: Kernel
    latent_rows: Kernel
    matmul_heads: Kernel
    matmul_rows: Kernel
    rms_norm: Kernel
    route_tokens: Kernel
    silu_and_mul: Kernel
    weighted_sum: Kernel


@dataclass(frozen=True, kw_only=True)
class Kernels(PlainOps):
    """The plain ops, and the makers of those that are made from their weights (kernels/linear.py says how)."""

    experts: Kernel
    latent_output: Kernel
    latent_project: Kernel
    linear: Kernel
    moe_output: Kernel
    program: Kernel
    router: Kernel
    swiglu: Kernel


PLAIN = tuple(field.name for field in fields(PlainOps))
MADE = tuple(field.name for field in fields(Kernels) if field.name not in PLAIN)


REFERENCE = dict.fromkeys(PLAIN, "torch") | dict.fromkeys(MADE, "parts")
"""Backends that are the reference of all others."""


def select_kernels(place: Place, backends: Mapping[str, str]) -> Kernels:
    """Choose a backend for every op and log the choice.

    Args:
        backends: op -> backend name, "auto" for the best that runs here.

    Raises:
        LookupError: a backend that does not exist or does not run here; the message starts with the op.
    """
    names = {op: choose(op, place, backends.get(op, "auto")) for op in (*PLAIN, *MADE)}
    log.info("kernels: %s", ", ".join(f"{op}={name}" for op, name in sorted(names.items())))
    plain = {op: select(op, place, names[op]) for op in PLAIN}
    parts = PlainOps(**plain)
    return Kernels(**plain, **{op: partial(select(op, place, names[op]), parts) for op in MADE})
