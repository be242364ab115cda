"""The store through which the collectives of all ranks find each other. Imports torch: for rank processes only."""

from __future__ import annotations

import socket
from datetime import timedelta

# torch.distributed re-exports it, but not in a way that the type checker accepts
from torch._C._distributed_c10d import TCPStore

from pegahpc.launch.messages import Store
from pegahpc.launch.rank_link import RankLink


def share_store(link: RankLink, timeout_s: float) -> TCPStore:
    """Rank 0 opens the store once the rendezvous has accepted the world; all others connect to it.

    Raises:
        TimeoutError or RuntimeError: the store was not reached in time.
    """
    if link.boot.context.rank == 0:
        return _open(link, timeout_s)
    found = link.wait_for_store(timeout_s)
    return TCPStore(found.host, found.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _open(link: RankLink, timeout_s: float) -> TCPStore:
    """Listen on the rank's own address only; by itself TCPStore would take every interface."""
    host = link.boot.context.bind_host
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    link.send(Store(host=host, port=port))
    return store
