"""Logits that are not finite fail their request, and leave nothing to whoever comes next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import admit, build, request
from inboxes import MemoryInbox, turn, turns
from msgspec.structs import replace
from oracles import save_tiny

from pegahpc.engine.loop import Engine, EngineError
from pegahpc.engine.sequence import Span
from pegahpc.kernels.selected import REFERENCE
from pegahpc.wire.messages import Abort, Aborted, Failed, Finished

US = b"us"
POISON = 301  # a token whose embedding is broken below
CLEAN = list(range(40, 60))
TORCH = [f"engine.backends.{op}={backend}" for op, backend in REFERENCE.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


@pytest.fixture(scope="module", params=["nan, compiled kernels", "nan, torch kernels", "inf, torch kernels"])
def case(request: pytest.FixtureRequest) -> tuple[float, list[str]]:
    """What the embedding holds, and the backends."""
    value, backends = request.param.split(", ")
    return float(value), TORCH if backends.startswith("torch") else []


@pytest.fixture
def engine(folder: Path, case: tuple[float, list[str]]) -> Engine:
    """Few pages, so that the next request gets the same ones."""
    sizes = ("engine.cache_tokens=128", "engine.max_prefill_rows=16", "engine.max_num_seqs=4")
    engine = build(folder, *sizes, *case[1])
    engine.runner.decoder.embed_VH[POISON] = case[0]
    return engine


@pytest.fixture
def inbox() -> MemoryInbox:
    return MemoryInbox()


@pytest.fixture(scope="module")
def wanted(folder: Path, case: tuple[float, list[str]]) -> list[int]:
    """What a clean request says on a fresh engine."""
    inbox = MemoryInbox()
    inbox.put(US, request("a", CLEAN, 60))
    turns(build(folder, "engine.cache_tokens=128", *case[1]), inbox)
    assert POISON not in inbox.tokens(US, "a"), "a prompt that these tests cannot judge"
    return inbox.tokens(US, "a")


def serve_clean(engine: Engine, inbox: MemoryInbox, name: str = "clean") -> list[int]:
    inbox.put(US, request(name, CLEAN, 60))
    turns(engine, inbox)
    return inbox.tokens(US, name)


def test_only_the_poisoned_request_fails(engine: Engine, inbox: MemoryInbox, wanted: list[int]) -> None:
    inbox.put(US, request("clean", CLEAN, 60))
    turn(engine, inbox)
    inbox.put(US, request("poisoned", [5, POISON, 7], 9))
    turns(engine, inbox)
    assert inbox.terminals(US, "poisoned") == [Failed("non-finite logits at position 3")]
    assert inbox.tokens(US, "poisoned") == []
    assert inbox.terminals(US, "clean") == [Finished(reason="length", prompt_tokens=20, completion_tokens=60)]
    assert inbox.tokens(US, "clean") == wanted


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_a_prompt_whose_logprobs_are_wanted_fails_at_the_first_position_that_has_none(
    engine: Engine, inbox: MemoryInbox, wanted: list[int], max_tokens: int
) -> None:
    """In chunks of 16 rows: what was finite has been told, and nothing after it.

    The torch kernels multiply what they mask by zero, so there the poison spoils its chunk from the chunk's start.
    """
    asked = request("poisoned", [5] * 20 + [POISON] + [6] * 40, max_tokens)
    inbox.put(US, replace(asked, prompt_logprobs=1))
    turns(engine, inbox)
    (terminal,) = inbox.terminals(US, "poisoned")
    assert terminal in [Failed(f"non-finite logits at position {position}") for position in (17, 21)]
    assert [len(update.prompt_logprobs) for update in inbox.updates(US) if update.prompt_logprobs] == [16]
    assert engine.runner.slab.isfinite().all() and serve_clean(engine, inbox) == wanted


def test_its_pages_are_zeroed_for_their_next_owner(engine: Engine, inbox: MemoryInbox, wanted: list[int]) -> None:
    inbox.put(US, request("poisoned", [5] * 30 + [POISON] + [6] * 60, 30))
    turns(engine, inbox)
    assert inbox.terminals(US, "poisoned") == [Failed("non-finite logits at position 91")]
    assert engine.load().used_pages == 0 and engine.runner.slab.isfinite().all()
    assert serve_clean(engine, inbox) == wanted


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_abort_in_the_middle_of_a_poisoned_prompt_leaves_nothing_either(
    engine: Engine, inbox: MemoryInbox, wanted: list[int], rounds: int
) -> None:
    inbox.put(US, request("poisoned", [POISON] * 90, 30))
    for _ in range(rounds):
        turn(engine, inbox)
    assert not engine.runner.slab.isfinite().all()
    inbox.put(US, Abort("poisoned"))
    turn(engine, inbox)
    assert inbox.terminals(US, "poisoned") == [Aborted()]
    assert engine.runner.slab.isfinite().all()
    assert serve_clean(engine, inbox) == wanted


def test_three_such_steps_in_a_row_end_the_rank(engine: Engine, inbox: MemoryInbox) -> None:
    for number in range(2):
        inbox.put(US, request(str(number), [POISON], 1))
        turn(engine, inbox)
        turn(engine, inbox)  # a step that samples nothing neither counts nor resets
    inbox.put(US, request("third", [POISON], 1))
    inbox.put(US, request("running", CLEAN, 60), request("waiting", CLEAN, 60))
    with pytest.raises(EngineError, match="rank 0: 3 steps in a row gave non-finite logits"):
        turn(engine, inbox)
    assert inbox.terminals(US, "third") == [Failed("non-finite logits at position 1")]
    for name in ("running", "waiting"):
        assert inbox.terminals(US, name) == [Failed("3 steps in a row gave non-finite logits")]
    assert not engine.scheduler.has_work


def test_a_good_step_between_starts_the_count_anew(engine: Engine, inbox: MemoryInbox) -> None:
    for number in range(6):
        inbox.put(US, request(f"bad {number}", [POISON], 1))
        if number % 2:
            turns(engine, inbox)
            inbox.put(US, request(f"good {number}", [7], 1))
        turns(engine, inbox)
    assert all(isinstance(inbox.terminals(US, f"bad {number}")[0], Failed) for number in range(6))


def test_a_padding_row_stays_the_same_to_the_byte_beside_poison(engine: Engine, inbox: MemoryInbox) -> None:
    def padding_row(token: int) -> torch.Tensor:
        """The second row of a step with one token."""
        sequence = admit(engine, "0", [token])
        hidden = engine.runner.forward([Span(sequence, 0, 1)])
        assert hidden.shape[0] == 2 and hidden[0].isfinite().all() == (token != POISON)
        assert sequence.cache is not None
        sequence.cache.drop()
        return hidden[1]

    clean = padding_row(7)
    assert clean.isfinite().all()
    assert torch.equal(padding_row(POISON), clean) and torch.equal(padding_row(7), clean)


def test_a_slots_former_pages_are_forgotten_while_poison_stands_on_them(
    folder: Path, case: tuple[float, list[str]], inbox: MemoryInbox
) -> None:
    """The short request reads whole splits of its slot's row of the page table, masked: nobody else's pages."""
    sizes = ("engine.cache_tokens=128", "engine.max_prefill_rows=16", "engine.max_num_seqs=2")
    engine = build(folder, *sizes, *case[1])
    inbox.put(US, request("fresh", [7], 8))
    turns(engine, inbox)
    wanted = inbox.tokens(US, "fresh")
    engine.runner.decoder.embed_VH[POISON] = case[0]
    inbox.put(US, request("all pages", [8] * 100, 28))  # in slot 1, which the short request takes next
    turns(engine, inbox)
    inbox.put(US, request("poisoned", [POISON] * 100, 4), request("short", [7], 8))
    turns(engine, inbox)
    assert isinstance(inbox.terminals(US, "poisoned")[0], Failed)
    assert inbox.tokens(US, "short") == wanted
