"""Prefix hits in a real engine: equal to cold in bits, at least one token computed, told on the wire."""

from pathlib import Path

import pytest
import torch
from engines import CLIENT, GREEDY, Collected, build, request
from inboxes import MemoryInbox, turn, turns
from oracles import save_tiny

from pegahpc.engine.loop import Engine
from pegahpc.page_names import model_salt, page_names, root_name
from pegahpc.wire.messages import Attach, Finished, Sampling

PAGE_TOKENS = 16
PREFIX = [3 + (7 * i) % 300 for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("v3"), "v3-groups")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return build(folder)


def serve(engine: Engine, name: str, prompt: list[int], num: int = 12, sampling: Sampling = GREEDY) -> Collected:
    collected = Collected()
    engine.submit(CLIENT, request(name, prompt, num, sampling))
    while engine.scheduler.has_work:
        engine.step()
        collected.take(engine)
    return collected


def cached(collected: Collected, name: str) -> int | None:
    (update,) = [update for update in collected.updates if update.id == name and update.scheduled is not None]
    return update.cached_tokens


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 31, 32, 33, 64, 99, 100])
def test_a_hit_gives_the_bits_and_tokens_of_a_cold_start(folder: Path, engine: Engine, shared: int) -> None:
    """Prompts that share so many tokens, then differ: logits of every position, and sampled tokens, are the same."""
    sampled = Sampling(temperature=1.0, seed=5)
    prompt = [*PREFIX[:shared], 5, 6, 7, 8, 9]
    serve(engine, "warm", PREFIX)
    warm = serve(engine, "a", prompt, 20, sampled)
    cold = serve(build(folder), "a", prompt, 20, sampled)
    assert cached(warm, "a") == shared // PAGE_TOKENS * PAGE_TOKENS and cached(cold, "a") == 0
    assert warm.tokens == cold.tokens


def test_the_same_prompt_again_computes_one_page_at_most(engine: Engine) -> None:
    first = serve(engine, "a", PREFIX[:64])
    second = serve(engine, "b", PREFIX[:64])
    assert cached(second, "b") == 48  # the fourth page is known too, but its last token has to be computed
    assert second.tokens["b"] == first.tokens["a"]


def test_generated_tokens_are_hit_by_the_next_turn(engine: Engine) -> None:
    first = serve(engine, "a", PREFIX[:30], 40)
    history = PREFIX[:30] + first.tokens["a"]  # 70 tokens, of which 69 have rows: four full pages
    second = serve(engine, "b", [*history, 9, 9])
    assert cached(second, "b") == 64


def test_a_hit_while_the_first_request_still_runs(engine: Engine) -> None:
    collected = Collected()
    engine.submit(CLIENT, request("a", PREFIX[:40], 50))
    while "a" not in collected.tokens or not collected.tokens["a"]:
        engine.step()
        collected.take(engine)
    engine.submit(CLIENT, request("b", PREFIX[:40], 50))
    while engine.scheduler.has_work:
        engine.step()
        collected.take(engine)
    assert cached(collected, "b") == 32 and collected.tokens["a"] == collected.tokens["b"]
    assert isinstance(collected.terminals["a"], Finished) and engine.load().used_pages == 0


def test_under_pressure_kept_pages_give_way_and_tokens_stay_the_same(folder: Path) -> None:
    small = build(folder, "engine.cache_tokens=256", "engine.max_num_seqs=4")
    large = build(folder)
    prompts = [[3 + (11 * k + 7 * i) % 300 for i in range(60)] for k in range(8)]
    for round_ in range(2):
        for k, prompt in enumerate(prompts):
            name = f"{round_}-{k}"
            assert serve(small, name, prompt).tokens == serve(large, name, prompt).tokens
    assert small.load().used_pages == 0
    assert len(small.scheduler.pool.names) <= 16


def test_a_request_that_fails_or_leaves_before_its_proof_leaves_nothing_to_hit(engine: Engine) -> None:
    engine.submit(CLIENT, request("a", PREFIX[:100], 9))
    engine.step()  # a chunk of 96 rows: six full pages, and no logits yet
    engine.abort(CLIENT, "a")
    assert engine.scheduler.pool.names == []
    embedding = engine.runner.decoder.embed_VH
    good = embedding[7].clone()
    embedding[7] = torch.inf
    serve(engine, "b", [*PREFIX[:40], 7])
    embedding[7] = good
    assert engine.scheduler.pool.names == [] and not engine.runner.slab.isnan().any()


def test_without_the_prefix_cache_nothing_is_kept(folder: Path) -> None:
    engine = build(folder, "engine.prefix_cache=false")
    serve(engine, "a", PREFIX)
    assert cached(serve(engine, "b", PREFIX), "b") == 0 and engine.scheduler.pool.names == []


def test_a_client_that_attaches_hears_all_names_then_every_change(folder: Path) -> None:
    engine, inbox = build(folder, "engine.cache_tokens=128"), MemoryInbox()
    root = root_name(model_salt(folder))
    serve(engine, "a", PREFIX[:33], 1)
    inbox.put(CLIENT, Attach())
    turn(engine, inbox)
    known: set[bytes] = set()
    inbox.put(CLIENT, request("b", [9] * 60, 30), request("c", PREFIX[:50], 40))
    turns(engine, inbox)
    is_first = True
    for _, outputs in inbox.sent:
        if outputs.kv_events is not None:
            assert outputs.kv_events.is_snapshot == is_first
            is_first = False
            known = (known | set(outputs.kv_events.stored)) - set(outputs.kv_events.removed)
            if outputs.kv_events.is_snapshot:
                assert known == set(page_names(PREFIX[:32], PAGE_TOKENS, root))
    assert known == set(engine.scheduler.pool.names) and known
