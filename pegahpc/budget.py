"""What a rank holds at each expert-parallel width, and whether that fits a device. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pegahpc.cache_layout import CacheLayout
from pegahpc.checkpoint.manifest import TensorSpec

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # conf/topology
GPU_RESERVE_BYTES = 8 << 30  # context, graphs, collective buffers and activations, which nobody has counted yet


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A checkpoint's tensors: those that every rank holds, and routed experts, of which each holds its share."""

    num_shared_tensors: int
    num_expert_tensors: int
    shared_bytes: int  # as stored
    expert_bytes: int
    shared_held_bytes: int  # in an engine: projections that are packed are unpacked, the router is float32
    expert_held_bytes: int

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], item: int, *, packed_experts: bool, num_copies: int = 1) -> Weights:
        """Count a manifest.

        Args:
            item: bytes of the engine's type.
            num_copies: by how many each expert tensor counts, where the manifest names the experts of one rank only.
        """
        tensors = list(tensors)
        shared = [tensor for tensor in tensors if tensor.expert is None and not tensor.is_stack]
        experts = [tensor for tensor in tensors if tensor.expert is not None]
        stacks = [tensor for tensor in tensors if tensor.is_stack]

        def held(of: list[TensorSpec]) -> int:
            return sum(tensor.held_bytes(item, packed_experts=packed_experts) for tensor in of)

        return cls(
            num_shared_tensors=len(shared) + len(stacks),
            num_expert_tensors=num_copies * len(experts),
            shared_bytes=_stored(shared),
            expert_bytes=num_copies * _stored(experts) + _stored(stacks),
            shared_held_bytes=held(shared),
            expert_held_bytes=num_copies * held(experts) + held(stacks),
        )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a fleet asks of each of its ranks beside the weights."""

    layout: CacheLayout
    num_pages: int  # with the padding page
    num_slots: int  # requests that may run at once: slots of State groups
    slab_bytes_per_peer: int  # of the fabric, itself included
    reserve_bytes: int

    @property
    def state_bytes(self) -> int:
        """All slots."""
        return self.num_slots * self.layout.state_bytes_per_slot


@dataclass(frozen=True, kw_only=True)
class Width:
    """One rank of so many: bytes of weights as stored and as held, and pages that its device has room for."""

    ep_size: int
    num_tensors_per_rank: int
    weights_bytes_per_rank: int
    held_bytes_per_rank: int
    needed_bytes: int  # all that the configuration asks of the rank, cache included
    max_pages: int | None  # with the padding page; None: the device's memory is not known
    fits: bool | None


def width(ep_size: int, weights: Weights, demand: Demand, device_bytes: int | None) -> Width:
    """A rank at this width.

    Args:
        device_bytes: memory that the rank may use; None: not known.
    """
    held = weights.shared_held_bytes + weights.expert_held_bytes // ep_size
    stride = demand.layout.page_stride_bytes
    fixed = held + demand.reserve_bytes + demand.state_bytes + ep_size * demand.slab_bytes_per_peer
    needed = fixed + demand.num_pages * stride
    return Width(
        ep_size=ep_size,
        num_tensors_per_rank=weights.num_shared_tensors + weights.num_expert_tensors // ep_size,
        weights_bytes_per_rank=weights.shared_bytes + weights.expert_bytes // ep_size,
        held_bytes_per_rank=held,
        needed_bytes=needed,
        max_pages=None if device_bytes is None else max(0, (device_bytes - fixed) // stride),
        fits=None if device_bytes is None else needed <= device_bytes,
    )


def advice(asked: Width, widths: Iterable[Width], demand: Demand) -> str:
    """What would fit, for a fleet of GPUs that does not."""
    widths, options = list(widths), []
    if asked.max_pages is not None and asked.max_pages >= 2:
        options.append(f"engine.cache_tokens={_tokens(asked, demand)}")
    elif tight := next((width for width in widths if width.max_pages and width.max_pages >= 2), None):
        with_less = "" if tight.fits else f" with engine.cache_tokens={_tokens(tight, demand)}"
        options.append(f"topology=ep{tight.ep_size}{with_less}")
    if (
        ample := next((width for width in widths if width.fits), None)
    ) and f"topology=ep{ample.ep_size}" not in options:
        options.append(f"topology=ep{ample.ep_size}")
    if options:
        return " or ".join(options) + " would fit"
    least = min((width.needed_bytes for width in widths), default=asked.needed_bytes)
    return f"no topology would: even the widest needs a device of {gib(least)}"


def _stored(tensors: list[TensorSpec]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _tokens(width: Width, demand: Demand) -> int:
    """That its cache may hold at most; the padding page holds none."""
    assert width.max_pages is not None
    return (width.max_pages - 1) * demand.layout.page_tokens


def gib(num_bytes: int) -> str:
    """`12.3 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"
