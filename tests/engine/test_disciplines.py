"""The disciplines of the free-running loop: held over thousands of steps, and each found out when it is broken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engines import admit, build, resolved
from oracles import SHAPE, save_tiny
from thread_world import Kind, Ledger, MixedInbox, run_threads, thread_world

from pegahpc.engine.build import slab_shape
from pegahpc.engine.loop import Engine
from pegahpc.engine.sequence import Sequence, Span
from pegahpc.models.decoder import StepInput
from pegahpc.moe.dispatch import STOPPING, ChainView, Received
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.moe.exchanges import DispatchTimeout
from pegahpc.moe.fabric import FabricPort, SlabShape

NUM_MOE_LAYERS = SHAPE["num_hidden_layers"] - SHAPE["first_k_dense_replace"]
EXCHANGES_A_STEP = 2 * NUM_MOE_LAYERS  # rows with their counts, outputs
NUM_STEPS = 10_000
SMALL = ("engine.max_num_seqs=8", "engine.max_prefill_rows=24", "engine.max_rows_per_step=32", "engine.idle_wait_ms=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


class Killed(Exception):
    """What a tray does to the ranks that are left."""


def run_mixed(engines: list[Engine], num_steps: int) -> tuple[list[MixedInbox], list[BaseException | None]]:
    """Every rank has its own traffic, and is asked to stop after its own number of steps."""
    inboxes = [MixedInbox(engine, seed) for seed, engine in enumerate(engines)]
    has_failed = threading.Event()

    def is_stopping(rank: int) -> bool:
        if has_failed.is_set():
            raise Killed
        is_over = engines[rank].status.step >= num_steps + 37 * rank
        inboxes[rank].is_closed = is_over
        return is_over

    def run(rank: int) -> None:
        try:
            engines[rank].run(inboxes[rank], partial(is_stopping, rank))
        except BaseException:
            has_failed.set()
            raise

    return inboxes, run_threads([partial(run, rank) for rank in range(len(engines))])


@pytest.mark.slow
def test_the_chain_is_the_same_in_every_step_of_a_mixed_run_and_all_leave_after_the_same_step(folder: Path) -> None:
    engines = thread_world(folder, *SMALL, kinds=[FabricDispatcher] * 2)
    ledgers = [Ledger(engine) for engine in engines]
    inboxes, errors = run_mixed(engines, NUM_STEPS)
    assert errors == [None, None]
    assert engines[0].status.step == engines[1].status.step >= NUM_STEPS + 37
    for engine, ledger, inbox in zip(engines, ledgers, inboxes, strict=True):
        assert set(ledger.counts) == {EXCHANGES_A_STEP} and len(ledger.counts) >= NUM_STEPS - 1
        assert engine.dispatcher.num_exchanges == engine.status.step * EXCHANGES_A_STEP
        assert inbox.num_asked > 500 and inbox.num_aborts > 50
        assert {name: len(ends) for name, ends in inbox.terminals.items()} == dict.fromkeys(
            map(str, range(inbox.num_asked)), 1
        )
        assert engine.load().used_pages == 0


class SkipsWhenIdle(FabricDispatcher):
    """Saves itself the exchanges of a step without rows."""

    def dispatch(self, x_TH: torch.Tensor, topk_idx_TK: torch.Tensor) -> Received:
        if x_TH.shape[0] or self.num_exchanges < EXCHANGES_A_STEP:  # the start barrier is kept
            return super().dispatch(x_TH, topk_idx_TK)
        return Received(rows_QH=x_TH, group_sizes=[0] * self.num_local_experts, route="skipped")

    def combine(self, out_QH: torch.Tensor, received: Received) -> torch.Tensor:
        return out_QH[:, None] if received.route == "skipped" else super().combine(out_QH, received)


class LeavesAlone(FabricDispatcher):
    """Takes its own wish to leave for everybody's."""

    def chain_view(self) -> ChainView:
        return ChainView(super().chain_view().has_work, bool(self.exchanges.chain.own & STOPPING))


def broken_world(folder: Path, kind: Kind) -> list[Engine]:
    """Rank 1 is broken; nobody waits long."""
    return thread_world(folder, *SMALL, "engine.backends.program=parts", kinds=[FabricDispatcher, kind], timeout_s=1.0)


def test_a_rank_that_skips_an_exchange_when_it_is_idle_is_named_and_its_ledger_shows_it(folder: Path) -> None:
    engines = broken_world(folder, SkipsWhenIdle)
    ledger = Ledger(engines[1])
    _, errors = run_mixed(engines, 300)
    assert set(ledger.counts) > {0} and isinstance(errors[1], Killed | DispatchTimeout)
    assert isinstance(errors[0], DispatchTimeout) and "rank 1 did not come to exchange" in str(errors[0])


def test_a_rank_that_leaves_alone_is_named_by_its_peers(folder: Path) -> None:
    engines = broken_world(folder, LeavesAlone)
    work = [
        partial(engines[0].run, MixedInbox(engines[0], 0), lambda: False),
        partial(engines[1].run, MixedInbox(engines[1], 1), lambda: engines[1].status.step >= 50),
    ]
    engines[1].scheduler.add = lambda sequence: None  # type: ignore[method-assign]  # it has nothing to finish
    errors = run_threads(work)
    assert errors[1] is None
    assert isinstance(errors[0], DispatchTimeout) and "rank 1 did not come to exchange" in str(errors[0])
    assert engines[0].dispatcher.waiting_for == "rank 1"


def test_a_rank_that_sends_more_than_the_bound_is_stopped_before_it_writes() -> None:
    shape = SlabShape(world_size=2, num_local_experts=2, max_pairs=8, hidden=4, dtype=torch.float32)
    ports = [FabricPort(rank, shape) for rank in range(2)]
    addresses = [port.address for port in ports]
    ranks: list[FabricDispatcher | None] = [None, None]

    def connect(rank: int) -> None:
        ranks[rank] = FabricDispatcher.connect(ports[rank], addresses, timeout_s=5)

    assert run_threads([partial(connect, rank) for rank in range(2)]) == [None, None]
    sender = ranks[0]
    assert sender is not None
    with pytest.raises(AssertionError, match=r"more rows than engine\.max_rows_per_step"):
        sender.dispatch(torch.zeros(5, 4), torch.tensor([[2, 3]] * 5))
    assert sender.num_exchanges == 0 and sender.doorbells()


def test_the_bound_of_a_slab_is_that_of_the_scheduler(folder: Path) -> None:
    fleet = resolved(folder, *SMALL, ep_size=2)
    assert slab_shape(fleet).max_pairs == 32 * SHAPE["num_experts_per_tok"]


def padding_faults(engine: Engine, intact: Engine) -> list[str]:
    """What is wrong with padding: 5 live rows in a bucket of 6, against 6 live rows and against other traffic."""
    forward(intact, admit(intact, "0", [3, 3, 3]), 3)
    found, hidden, written = [], [], []
    for tokens in ([9, 8, 7, 6, 5], [50, 60, 70, 80, 90]):
        sequence = admit(engine, "0", tokens)
        out, page = forward(engine, sequence, 5)
        hidden.append(out[5])
        written.append((tokens, page[: engine.runner.slab.shape[1], :5].clone()))
    if not torch.equal(hidden[0], hidden[1]):
        found.append("its row changes with the traffic")
    for tokens, rows in written:
        _, page = forward(engine, admit(engine, "0", [*tokens, 4]), 6)
        if not torch.equal(page[:, :5], rows):
            found.append("it writes into a page of a request")
    if not torch.equal(engine.runner.slab[0], intact.runner.slab[0]):
        found.append("the padding page does not hold token 0 at position 0")
    return found


def forward(engine: Engine, sequence: Sequence, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows of one step and the request's first page; its pages are given back."""
    assert sequence.cache is not None
    out = engine.runner.forward([Span(sequence, 0, num_rows)])
    page = engine.runner.slab[sequence.cache.pages[0]].clone()
    sequence.cache.drop()
    return out, page


def test_padding_rows_that_are_protocol_pass(folder: Path) -> None:
    assert padding_faults(build(folder), build(folder)) == []


def with_garbage_tokens(engine: Engine) -> None:
    """Padding rows carry the token of the first live row."""
    make = engine.runner._input

    def broken(spans: list[Span]) -> StepInput:
        step = make(spans)
        step.token_ids_T[step.num_live :] = step.token_ids_T[0]
        return step

    engine.runner._input = broken  # type: ignore[method-assign]


def with_a_live_page(engine: Engine) -> None:
    """Padding rows are written where the first row is."""
    make = engine.runner._input

    def broken(spans: list[Span]) -> StepInput:
        step = make(spans)
        step.attention.row_idx_T[step.num_live :] = step.attention.row_idx_T[0]
        return step

    engine.runner._input = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (with_garbage_tokens, "its row changes with the traffic"),
        (with_garbage_tokens, "the padding page does not hold token 0 at position 0"),
        (with_a_live_page, "it writes into a page of a request"),
    ],
)
def test_padding_rows_with_garbage_are_found(folder: Path, break_it: Callable[[Engine], None], says: str) -> None:
    engine = build(folder)
    break_it(engine)
    assert says in padding_faults(engine, build(folder))
