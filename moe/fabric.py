"""The fabric's memory and doorbells on one host: slabs that peers map and write, and eventfds that they ring.

A rank owns one slab, an anonymous memory file without a name (memfd), and one doorbell for each peer. Both are handed
over once, as descriptors over an AF_UNIX socket (SCM_RIGHTS) in the abstract namespace: nothing of it has a path, so
nothing is left behind, however a process ends. From then on peers put rows and ring without any host message.

A doorbell is a semaphore in the kernel: the write by the peer and the read by the owner are system calls, which order
the memory accesses around them on every processor.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT_BYTES = 64
HELLO_BYTES = 64  # token (32 hex digits), then the caller's rank, padded with blanks


@dataclass(frozen=True, kw_only=True)
class SlabShape:
    """Sizes that every rank of a fleet shares: protocol bounds, never what a peer has now."""

    world_size: int
    num_local_experts: int
    max_pairs: int  # (row, expert) pairs that one rank may send another in one exchange
    hidden: int
    dtype: torch.dtype

    @property
    def header_bytes(self) -> int:
        """The chain word and one count for each local expert, int64."""
        return _aligned(8 * (1 + self.num_local_experts))

    @property
    def rows_bytes(self) -> int:
        """A full window of rows."""
        return _aligned(self.max_pairs * self.hidden * self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """What one peer may write: header, rows to compute, outputs that come home."""
        return self.header_bytes + 2 * self.rows_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Window:
    """One peer's block of a slab."""

    header: npt.NDArray[np.int64]  # [1 + num_local_experts]: the chain word, pairs for each local expert
    rows: torch.Tensor  # [max_pairs, hidden], rows to compute
    outputs: torch.Tensor  # [max_pairs, hidden], outputs of rows that the slab's owner sent


def map_windows(slab_fd: int, shape: SlabShape) -> list[Window]:
    """The blocks of a slab, by the rank that writes them."""
    memory = mmap.mmap(slab_fd, shape.world_size * shape.block_bytes)
    size = shape.max_pairs * shape.hidden

    def window(rank: int) -> Window:
        start = rank * shape.block_bytes
        rows, outputs = start + shape.header_bytes, start + shape.header_bytes + shape.rows_bytes
        return Window(
            np.frombuffer(memory, np.int64, 1 + shape.num_local_experts, start),
            torch.frombuffer(memory, dtype=shape.dtype, count=size, offset=rows).view(-1, shape.hidden),
            torch.frombuffer(memory, dtype=shape.dtype, count=size, offset=outputs).view(-1, shape.hidden),
        )

    return [window(rank) for rank in range(shape.world_size)]


class FabricPort:
    """Where a rank's peers fetch its slab and their doorbells; `address` travels in the rendezvous.

    A caller must run as the same user (SO_PEERCRED) and know the token, which only the rendezvous gives out.
    """

    def __init__(self, rank: int, shape: SlabShape) -> None:
        self.rank, self.shape = rank, shape
        self.slab_fd = os.memfd_create(f"pegahpc-slab-{rank}")
        os.ftruncate(self.slab_fd, shape.world_size * shape.block_bytes)
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.bells = [os.eventfd(0, flags) for _ in range(shape.world_size)]
        self._token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"pegahpc-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(shape.world_size)
        self.address = f"{name}:{self._token}"
        threading.Thread(target=self._serve, name="fabric-port", daemon=True).start()

    def close(self) -> None:
        """Take no more callers; what was handed over stays."""
        self._listener.close()

    def _serve(self) -> None:
        """Answer callers one after the other, a second each at most, until every peer has what it needs."""
        missing = set(range(self.shape.world_size)) - {self.rank}
        while missing:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(1.0)
                caller = self._admit(connection)
                if caller is not None:
                    socket.send_fds(connection, [b"fabric"], [self.slab_fd, self.bells[caller]])
                    missing.discard(caller)
        self._listener.close()

    def _admit(self, connection: socket.socket) -> int | None:
        """The caller's rank, or None for a stranger; another user's words are not waited for."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            return None
        try:
            hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL).decode("ascii", "replace")
        except OSError:
            return None
        token, rank = hello[:32], hello[32:].strip()
        is_ours = hmac.compare_digest(token.encode(), self._token.encode())
        return int(rank) if is_ours and rank.isdigit() and int(rank) < self.shape.world_size else None


@dataclass(frozen=True)
class Peer:
    """A peer's slab, as mapped here, and its doorbell for this rank."""

    windows: list[Window]
    bell_fd: int


def fetch(address: str, *, own_rank: int, shape: SlabShape, timeout_s: float) -> Peer:
    """Fetch a peer's descriptors and map its slab; success is the probe that both ranks share a kernel.

    Raises:
        TimeoutError: the peer did not answer in time, or is on another host.
    """
    name, token = address.split(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(deadline - time.monotonic(), 0.1))
                connection.connect(f"\0{name}")
                connection.sendall(f"{token}{own_rank}".ljust(HELLO_BYTES).encode())
                _, fds, _, _ = socket.recv_fds(connection, 16, 2)
            if len(fds) == 2:
                windows = map_windows(fds[0], shape)
                os.close(fds[0])
                return Peer(windows, fds[1])
        except OSError:
            pass  # not there yet, or another kernel's namespace: the deadline decides
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no slab from {name} within {timeout_s:g} s; are all ranks on one host?")
        time.sleep(0.02)


def ring(bell_fd: int) -> None:
    """One more put is complete."""
    os.eventfd_write(bell_fd, 1)


def has_rung(bell_fd: int) -> bool:
    """Take one ring if there is one."""
    try:
        os.eventfd_read(bell_fd)
    except BlockingIOError:
        return False
    return True


def wait_for_ring(bell_fd: int, timeout_s: float) -> bool:
    """Sleep until the bell rings and take the ring; False when it did not within timeout_s."""
    poll = select.poll()
    poll.register(bell_fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3)) and has_rung(bell_fd)
