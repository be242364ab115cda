"""The fabric's memory and doorbells on one host: slabs that peers map and write, and the bells that wake their owners.

A rank owns one slab, an anonymous memory file without a name (memfd), and one doorbell (eventfd). Both are handed
over once, as descriptors over an AF_UNIX socket (SCM_RIGHTS) in the abstract namespace: nothing of it has a path, so
nothing is left behind, however a process ends. From then on peers put rows and arrive (kernels/csrc/fabric.c) without
any host message.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

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
    def door_bytes(self) -> int:
        """What a slab begins with: two counts of arrivals, the owner's state, and the exchanges of each peer, int64."""
        return _aligned(8 * (3 + self.world_size))

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

    @property
    def slab_bytes(self) -> int:
        """A rank's whole slab."""
        return self.door_bytes + self.world_size * self.block_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Slab:
    """A slab as it is mapped in this process: addresses of its parts, valid as long as this lives."""

    def __init__(self, slab_fd: int, shape: SlabShape) -> None:
        self._memory = mmap.mmap(slab_fd, shape.slab_bytes)
        self._shape = shape
        self.door = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def header(self, rank: int) -> int:
        """What `rank` writes here: the chain word, then its pairs for each local expert."""
        return self.door + self._shape.door_bytes + rank * self._shape.block_bytes

    def rows(self, rank: int) -> int:
        """[max_pairs, hidden], rows from `rank` to compute."""
        return self.header(rank) + self._shape.header_bytes

    def outputs(self, rank: int) -> int:
        """[max_pairs, hidden], outputs by `rank` of rows that the slab's owner sent."""
        return self.rows(rank) + self._shape.rows_bytes


class FabricPort:
    """Where a rank's peers fetch its slab and its doorbell; `address` travels in the rendezvous.

    A caller must run as the same user (SO_PEERCRED) and know the token, which only the rendezvous gives out.
    """

    def __init__(self, rank: int, shape: SlabShape) -> None:
        self.rank, self.shape = rank, shape
        self.slab_fd = os.memfd_create(f"pegahpc-slab-{rank}")
        os.ftruncate(self.slab_fd, shape.slab_bytes)
        self.bell_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
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
                if caller is None:
                    continue
                with contextlib.suppress(OSError):  # it is gone, and may come again
                    socket.send_fds(connection, [b"fabric"], [self.slab_fd, self.bell_fd])
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
    """A rank's slab, as mapped here, and its doorbell."""

    slab: Slab
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
                slab = Slab(fds[0], shape)
                os.close(fds[0])
                return Peer(slab, fds[1])
        except OSError:
            pass  # not there yet, or another kernel's namespace: the deadline decides
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no slab from {name} within {timeout_s:g} s; are all ranks on one host?")
        time.sleep(0.02)
