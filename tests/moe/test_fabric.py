"""The fabric between real slabs and doorbells: ranks are threads here, processes in tests/engine."""

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from pegahpc.kernels import native
from pegahpc.moe.dispatch import HAS_WORK, STOPPING
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.moe.exchanges import DispatchTimeout
from pegahpc.moe.fabric import HELLO_BYTES, FabricPort, SlabShape, fetch

T = TypeVar("T")
WORLD_SIZE, NUM_EXPERTS, HIDDEN, TOPK = 3, 6, 5, 2
STEPS = 200
SHAPE = SlabShape(
    world_size=WORLD_SIZE, num_local_experts=NUM_EXPERTS // WORLD_SIZE, max_pairs=40, hidden=HIDDEN, dtype=torch.float32
)
pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def on_all_ranks(run: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        return list(pool.map(run, range(WORLD_SIZE), timeout=60))


def connect(timeout_s: float = 20.0) -> list[FabricDispatcher]:
    ports = [FabricPort(rank, SHAPE) for rank in range(WORLD_SIZE)]
    addresses = [port.address for port in ports]
    return on_all_ranks(lambda rank: FabricDispatcher.connect(ports[rank], addresses, timeout_s=timeout_s))


@pytest.fixture
def ranks() -> list[FabricDispatcher]:
    return connect()


def expert(rows: torch.Tensor, expert_id: int) -> torch.Tensor:
    """Each expert does something that no other does."""
    return rows * (expert_id + 2) + expert_id


def serve(dispatcher: FabricDispatcher, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """One layer of one rank: its experts on whatever arrives."""
    received = dispatcher.dispatch(x, idx)
    groups = torch.split(received.rows_QH, received.group_sizes)
    outputs = [expert(group, dispatcher.first_expert + i) for i, group in enumerate(groups)]
    return dispatcher.combine(torch.cat(outputs), received)


def wanted(x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*idx.shape, HIDDEN)
    for row in range(idx.shape[0]):
        for slot in range(idx.shape[1]):
            out[row, slot] = expert(x[row], int(idx[row, slot]))
    return out


@pytest.mark.parametrize("rows", [(0, 0, 0), (1, 0, 0), (7, 3, 20), (20, 20, 20)])
def test_every_output_comes_home_whatever_each_rank_sends(ranks: list[FabricDispatcher], rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    steps = [
        [
            (
                torch.randn(count, HIDDEN, generator=generator),
                torch.rand(count, NUM_EXPERTS, generator=generator).topk(TOPK).indices.sort(-1).values,
            )
            for count in rows
        ]
        for _ in range(5)
    ]
    for step in steps:
        outputs = on_all_ranks(lambda rank, step=step: serve(ranks[rank], *step[rank]))  # type: ignore[misc]
        for (x, idx), y in zip(step, outputs, strict=True):
            assert torch.equal(y, wanted(x, idx))
    assert [rank.num_exchanges for rank in ranks] == [10] * WORLD_SIZE


def test_all_rows_to_one_expert_fill_its_window_and_no_more(ranks: list[FabricDispatcher]) -> None:
    x = torch.arange(20.0 * HIDDEN).view(20, HIDDEN)
    idx = torch.tensor([[4, 5]]).expand(20, 2)
    outputs = on_all_ranks(lambda rank: serve(ranks[rank], x + rank, idx))
    for rank, y in enumerate(outputs):
        assert torch.equal(y, wanted(x + rank, idx))


def test_the_words_of_all_ranks_are_seen_by_all(ranks: list[FabricDispatcher]) -> None:
    none = (torch.empty(0, HIDDEN), torch.empty(0, TOPK, dtype=torch.int64))

    def step(words: list[int]) -> list[tuple[bool, bool]]:
        def run(rank: int) -> tuple[bool, bool]:
            ranks[rank].begin_step(words[rank])
            serve(ranks[rank], *none)
            serve(ranks[rank], *none)  # a second layer changes nothing
            view = ranks[rank].chain_view()
            return view.has_work, view.is_stopping

        return on_all_ranks(run)

    assert step([0, 0, 0]) == [(False, False)] * 3
    assert step([0, HAS_WORK, 0]) == [(True, False)] * 3
    assert step([STOPPING, STOPPING, 0]) == [(False, False)] * 3
    assert step([STOPPING, STOPPING | HAS_WORK, STOPPING]) == [(True, True)] * 3


def test_a_peer_that_does_not_come_is_named_within_the_bound() -> None:
    ranks = connect(timeout_s=0.3)
    none = (torch.empty(0, HIDDEN), torch.empty(0, TOPK, dtype=torch.int64))
    with ThreadPoolExecutor(2) as pool:  # rank 2 stays away
        results = [pool.submit(serve, ranks[rank], *none) for rank in (0, 1)]
        for result in results:
            with pytest.raises(DispatchTimeout, match=r"rank 2 did not come to exchange 0 within 0\.3 s"):
                result.result(timeout=20)
    assert ranks[0].waiting_for == "rank 2"


def test_signals_that_come_all_the_time_do_not_undo_the_bound() -> None:
    rank = connect(timeout_s=0.3)[0]
    none = (torch.empty(0, HIDDEN), torch.empty(0, TOPK, dtype=torch.int64))
    stop = threading.Timer(4.0, signal.setitimer, (signal.ITIMER_REAL, 0))  # or the test never ends if it fails
    stop.start()
    before, started = signal.signal(signal.SIGALRM, lambda *_: None), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)  # shorter than a sleeper's look around
    try:
        with pytest.raises(DispatchTimeout, match="rank 1 did not come"):
            serve(rank, *none)
        assert time.monotonic() - started < 3.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.cancel()


@pytest.mark.parametrize("is_early", [True, False], ids=["it came before", "it comes later"])
def test_a_rank_that_rests_is_woken_by_the_first_peer_that_begins_a_step(is_early: bool) -> None:
    ranks = connect()
    none = (torch.empty(0, HIDDEN), torch.empty(0, TOPK, dtype=torch.int64))
    for _ in range(3):  # of both parities, and more than once
        with ThreadPoolExecutor(2) as pool:
            if not is_early:
                assert not rings(ranks[0].doorbells()[0], 0.05)
            first = pool.submit(serve, ranks[1], *none)
            if is_early:
                time.sleep(0.05)
                ranks[0].doorbells()
            assert rings(ranks[0]._bell_fd, 5.0)
            others = [pool.submit(serve, ranks[2], *none)]
            serve(ranks[0], *none)
            for result in (first, *others):
                result.result(timeout=20)
        assert not rings(ranks[0].doorbells()[0], 0.0)  # nobody has begun another step
        ranks[0].begin_step(0)


def test_no_rest_is_slept_through_and_no_row_is_lost_whatever_the_pace() -> None:
    ranks = connect()
    starters = [random.Random(step).choice([None, *range(WORLD_SIZE)]) for step in range(STEPS)]  # None: nobody rests

    def run(rank: int) -> None:
        own = random.Random(rank)
        for step, starter in enumerate(starters):
            if starter is not None and rank != starter:
                assert rings(ranks[rank].doorbells()[0], 10.0), f"rank {rank} slept through step {step}"
            if own.random() < 0.2:
                time.sleep(own.random() * 1e-3)
            num_rows = own.choice([0, 0, 1, 5])
            x = torch.full((num_rows, HIDDEN), float(1000 * rank + step))
            idx = torch.tensor([sorted(own.sample(range(NUM_EXPERTS), TOPK)) for _ in range(num_rows)]).long()
            idx = idx.view(num_rows, TOPK)
            for layer in range(2):
                assert torch.equal(serve(ranks[rank], x + layer, idx), wanted(x + layer, idx))

    on_all_ranks(run)
    assert [rank.num_exchanges for rank in ranks] == [4 * STEPS] * WORLD_SIZE


def rings(bell_fd: int, timeout_s: float) -> bool:
    return bool(select.select([bell_fd], [], [], timeout_s)[0])


def test_a_stranger_gets_no_descriptor_and_the_peers_still_do() -> None:
    port = FabricPort(0, SHAPE)
    name, token = port.address.split(":")
    for hello in (b"x" * HELLO_BYTES, f"{'0' * 32}1".ljust(HELLO_BYTES).encode(), b"short"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(f"\0{name}")
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            data, fds, _, _ = socket.recv_fds(stranger, 16, 2)
            assert (data, fds) == (b"", [])
    assert len(token) == 32
    peer = fetch(port.address, own_rank=1, shape=SHAPE, timeout_s=5)
    assert peer.slab.outputs(WORLD_SIZE - 1) + SHAPE.rows_bytes == peer.slab.door + SHAPE.slab_bytes


def test_a_caller_that_is_gone_before_its_answer_keeps_nobody_out() -> None:
    port = FabricPort(0, SHAPE)
    name, token = port.address.split(":")
    with socket.socket(socket.AF_UNIX) as silent:  # the port hears it first, for a second at most
        silent.connect(f"\0{name}")
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(f"\0{name}")
            gone.sendall(f"{token}1".ljust(HELLO_BYTES).encode())
    for rank in (1, 2):
        assert fetch(port.address, own_rank=rank, shape=SHAPE, timeout_s=5).bell_fd >= 0


def test_an_address_of_another_host_is_found_out_within_the_bound() -> None:
    with pytest.raises(TimeoutError, match="are all ranks on one host"):
        fetch(f"pegahpc-nobody:{'0' * 32}", own_rank=1, shape=SHAPE, timeout_s=0.2)


def test_nothing_of_a_fabric_has_a_path_and_its_port_closes_by_itself() -> None:
    before = set(os.listdir("/dev/shm"))
    num_threads = threading.active_count()
    connect()
    assert set(os.listdir("/dev/shm")) == before
    deadline = threading.Event()
    for _ in range(100):
        if threading.active_count() <= num_threads:
            break
        deadline.wait(0.05)
    assert threading.active_count() <= num_threads
