"""The kernels of one engine: each op's function, chosen once for its place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

# Importing a module registers its implementations.
import pegahpc.kernels.grouped_swiglu
import pegahpc.kernels.latent_attention
import pegahpc.kernels.latent_rows
import pegahpc.kernels.matmul_heads
import pegahpc.kernels.matmul_rows
import pegahpc.kernels.native_ops
import pegahpc.kernels.rms_norm
import pegahpc.kernels.route_tokens
import pegahpc.kernels.swiglu  # noqa: F401
from pegahpc.kernels.registry import Kernel, Place, choose, select

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One function an op; the signatures stand in the modules of that name."""

    grouped_swiglu: Kernel
    latent_attention: Kernel
    latent_rows: Kernel
    matmul_heads: Kernel
    matmul_rows: Kernel
    rms_norm: Kernel
    route_tokens: Kernel
    silu_and_mul: Kernel
    weighted_sum: Kernel


def select_kernels(place: Place, backends: Mapping[str, str]) -> Kernels:
    """Choose a backend for every op and log the choice.

    Args:
        backends: op -> backend name, "auto" for the best that runs here.

    Raises:
        LookupError: a backend that does not exist or does not run here; the message starts with the op.
    """
    names = {op: choose(op, place, backends.get(op, "auto")) for op in Kernels.__dataclass_fields__}
    log.info("kernels: %s", ", ".join(f"{op}={name}" for op, name in sorted(names.items())))
    return Kernels(**{op: select(op, place, name) for op, name in names.items()})
