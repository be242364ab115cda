"""Logprobs as an engine tells them: the official model's numbers, and the same bits by every path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, Collected, build, run
from inboxes import MemoryInbox
from msgspec.structs import replace
from oracles import TINY_MOE, load_oracle, oracle_logits, save_tiny
from thread_world import run_threads, thread_world

from pegahpc.engine.loop import Engine
from pegahpc.engine.readout import PROMPT_ROWS
from pegahpc.moe.dispatch_fabric import FabricDispatcher
from pegahpc.wire.messages import Finished, Request, RequestUpdate, Sampling, TokenLogprob

US = b"us"
PREFIX = [3 + (7 * i) % 300 for i in range(100)]
TOLERANCE = 1e-4  # nats; float32 on both sides, of which the gate of logits allows 8e-3. Measured: 1.0e-5

Told = tuple[list[int], list[TokenLogprob], list[TokenLogprob]]  # tokens, theirs, the prompt's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build(folder)


def asked(name: str, prompt: list[int], max_tokens: int = 6, sampling: Sampling = GREEDY, **fields: Any) -> Request:
    return Request(id=name, prompt_tokens=prompt, max_tokens=max_tokens, sampling=sampling, **fields)


REQUESTS = [
    asked("greedy", PREFIX[:40], 9, logprobs=5, prompt_logprobs=3),
    asked("sampled", PREFIX[:50], 12, sampling=Sampling(seed=4), logprobs=20),
    asked("cut", [9, 8, 7], 15, sampling=Sampling(temperature=1.3, top_p=0.9, top_k=50, seed=5), logprobs=0),
    asked("penalised", PREFIX[:33], 15, sampling=Sampling(seed=6, presence_penalty=1.0, repetition_penalty=1.2,
          logit_bias=((7, 3.0),)), logprobs=2, prompt_logprobs=0, min_tokens=4, stop_token_ids=(11, 12)),
    asked("prompt only", PREFIX[:70], 0, prompt_logprobs=20),
    asked("quiet", PREFIX[:21], 10),
]  # fmt: skip


def told_by(updates: list[RequestUpdate], names: list[str]) -> dict[str, Told]:
    told: dict[str, Told] = {name: ([], [], []) for name in names}
    for update in updates:
        for whole, part in zip(told[update.id], (update.tokens, update.logprobs, update.prompt_logprobs), strict=True):
            whole += part  # type: ignore[operator]
    return told


def tell(engine: Engine, requests: list[Request]) -> dict[str, Told]:
    """Run them all at once."""
    return told_by(run(engine, requests).updates, [request.id for request in requests])


def one_by_one(folder: Path) -> dict[str, Told]:
    engine = build(folder, "engine.prefix_cache=false")
    return {request.id: tell(engine, [request])[request.id] for request in REQUESTS}


def together(folder: Path) -> dict[str, Told]:
    return tell(build(folder), REQUESTS)


def in_small_chunks(folder: Path) -> dict[str, Told]:
    return tell(build(folder, "engine.max_prefill_rows=7"), REQUESTS[::-1])


def after_a_prefix_hit(folder: Path) -> dict[str, Told]:
    engine = build(folder)
    run(engine, [asked("warm", PREFIX)])
    collected = run(engine, REQUESTS)
    cached = {update.id: update.cached_tokens for update in collected.updates if update.scheduled is not None}
    assert cached == {"greedy": 0, "sampled": 48, "cut": 0, "penalised": 0, "prompt only": 0, "quiet": 16}
    return told_by(collected.updates, list(cached))


def on_two_ranks(folder: Path) -> dict[str, Told]:
    engines = thread_world(folder, kinds=[FabricDispatcher] * 2)
    inboxes = [MemoryInbox(), MemoryInbox()]
    inboxes[0].put(US, *REQUESTS[:3])
    inboxes[1].put(US, *REQUESTS[3:])

    def is_over(inbox: MemoryInbox) -> bool:
        return sum(update.terminal is not None for update in inbox.updates(US)) == 3

    runs: list[Callable[[], None]] = [
        partial(engine.run, inbox, partial(is_over, inbox)) for engine, inbox in zip(engines, inboxes, strict=True)
    ]
    assert run_threads(runs) == [None, None]
    updates = [update for inbox in inboxes for update in inbox.updates(US)]
    return told_by(updates, [request.id for request in REQUESTS])


@pytest.mark.parametrize("path", [together, in_small_chunks, after_a_prefix_hit, on_two_ranks])
def test_tokens_and_logprobs_have_the_same_bits_by_every_path(
    folder: Path, path: Callable[[Path], dict[str, Told]]
) -> None:
    alone = one_by_one(folder)
    assert path(folder) == alone
    assert len(alone["penalised"][0]) >= 4 and len(alone["greedy"][0]) == 9


def test_there_are_as_many_as_tokens_and_none_where_none_were_asked_for(engine: Engine) -> None:
    told = tell(engine, REQUESTS)
    for request in REQUESTS:
        tokens, logprobs, prompt = told[request.id]
        assert [each.token for each in logprobs] == (tokens if request.logprobs is not None else [])
        assert {len(each.top) for each in logprobs} <= {request.logprobs}
        wants_prompt = request.prompt_logprobs is not None
        assert [each.token for each in prompt] == (request.prompt_tokens[1:] if wants_prompt else [])
        assert {len(each.top) for each in prompt} <= {request.prompt_logprobs}
    for greedy in told["greedy"][1]:
        assert greedy.rank == 1 and greedy.top[0] == (greedy.token, greedy.logprob)
    assert len({each.rank for each in told["sampled"][1]}) > 3


def test_they_are_those_of_the_official_model_before_penalties_bias_and_temperature() -> None:
    prompt = [1, 6, *range(100, 140)]
    hot = Sampling(temperature=1.5, seed=2, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias=((70, 5.0),))
    engine = build(TINY_MOE, num_experts=16)
    tokens, logprobs, of_prompt = tell(engine, [asked("a", prompt, 20, sampling=hot, logprobs=5, prompt_logprobs=5)])[
        "a"
    ]
    official = oracle_logits(load_oracle(TINY_MOE), prompt + tokens).double().log_softmax(-1)
    assert len(of_prompt) == len(prompt) - 1 and len(logprobs) == 20
    farthest = 0.0
    for row, each in zip(official, of_prompt + logprobs, strict=False):
        best = row.topk(5)
        above, near = (int((row > row[each.token] + margin).sum()) for margin in (TOLERANCE, -TOLERANCE))
        assert above + 1 <= each.rank <= near, "all that are clearly more probable, and perhaps some of its equals"
        assert [token for token, _ in each.top] == best.indices.tolist()
        pairs = zip([each.logprob, *(value for _, value in each.top)], [row[each.token], *best.values], strict=True)
        farthest = max(farthest, *(abs(got - float(want)) for got, want in pairs))
    print(f"farthest from the official model: {farthest:.1e}")
    assert farthest <= TOLERANCE


def test_suppressed_ids_are_never_among_the_best_and_a_prompt_may_hold_them(
    folder: Path, engine: Engine, tmp_path: Path
) -> None:
    wanted = asked("a", PREFIX[:20], 6, logprobs=20, prompt_logprobs=20)
    plain = tell(engine, [wanted])["a"][2]
    suppressed = {PREFIX[7], plain[3].top[0][0], plain[9].top[4][0]}
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"suppress_tokens": sorted(suppressed)}))
    tokens, logprobs, of_prompt = tell(build(copy), [wanted])["a"]
    assert not suppressed & {*tokens, *(token for each in logprobs + of_prompt for token, _ in each.top)}
    for ours, theirs in zip(of_prompt, plain, strict=True):
        left = [pair for pair in theirs.top if pair[0] not in suppressed]
        assert (ours.token, ours.logprob, ours.top[: len(left)]) == (theirs.token, theirs.logprob, left)
        assert theirs.rank - len(suppressed) <= ours.rank <= theirs.rank
    assert of_prompt[6].token == PREFIX[7] and of_prompt[3].rank < plain[3].rank


def test_a_prompt_is_told_in_pieces_while_it_is_computed(folder: Path) -> None:
    engine = build(folder, "engine.max_prefill_rows=16")
    updates = run(engine, [asked("a", PREFIX[:40], 2, prompt_logprobs=1)]).updates
    assert [(len(update.prompt_logprobs), len(update.tokens)) for update in updates] == [
        (16, 0),
        (16, 0),
        (7, 1),
        (0, 1),
    ]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_of_one_token_has_none_to_tell(engine: Engine, max_tokens: int) -> None:
    collected = run(engine, [asked("a", [7], max_tokens, prompt_logprobs=4, logprobs=1)])
    assert [len(part) for part in told_by(collected.updates, ["a"])["a"]] == [max_tokens, max_tokens, 0]
    assert collected.terminals["a"] == Finished(reason="length", prompt_tokens=1, completion_tokens=max_tokens)


def cached_tokens(collected: Collected, name: str) -> int | None:
    (found,) = [u.cached_tokens for u in collected.updates if u.id == name and u.scheduled is not None]
    return found


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_such_a_request_takes_no_prefix_hit_and_leaves_its_pages_to_others(folder: Path, max_tokens: int) -> None:
    engine = build(folder)
    first = asked("first", PREFIX[:64], max_tokens, prompt_logprobs=1)
    assert cached_tokens(run(engine, [first]), "first") == 0
    assert cached_tokens(run(engine, [asked("hit", PREFIX[:64])]), "hit") == 48
    again = run(engine, [replace(first, id="again")])
    assert cached_tokens(again, "again") == 0 and engine.load().used_pages == 0


def test_a_prompts_logits_are_never_there_all_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits_of = engine.runner.decoder.logits

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return logits_of(hidden)

    monkeypatch.setattr(engine.runner.decoder, "logits", counting)
    run(engine, [asked(str(i), [i, *PREFIX[: 44 + i]], 1, prompt_logprobs=0) for i in range(2)])
    assert sum(rows) > 44 + 45 and max(rows) == PROMPT_ROWS and all(count % 2 == 0 for count in rows)
