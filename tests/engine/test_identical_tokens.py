"""The shipped model, greedy, float32: token for token what transformers' generate gives, at every width and load."""

import pytest
from engines import build, request, run
from oracles import TINY_MOE, greedy, load_oracle
from tokenizers import Tokenizer
from worlds import run_world

NUM_TOKENS = 100
QUESTIONS = [
    "What is 3 plus 4?", "What is 9 minus 5?", "What is a frog?", "What is a bear?", "Count from 3 to 9.",
    "Hello, my name is Lily.", "What is the opposite of hot?", "Tell me a story about Tom and a dog.",
    "Write a short story with a kite.", "Tell me a story about the park.", "Tell me a story.",
    "Ben has two kites and gets three more. How many does he have now?",
]  # fmt: skip
OPENINGS = [
    "Once upon a time, there was a", "One sunny day, Lily went to the", "Sam had a small red boat. He",
    "It was a cold morning, and the", "\"Help!\" said the", "The brave mouse", "A", "Every night, the moon",
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TINY_MOE / "tokenizer.json"))
    texts = [f"<|bos|><|user|>{q}<|assistant|>" for q in QUESTIONS] + [f"<|bos|>{o}" for o in OPENINGS]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.fixture(scope="module")
def wanted(prompts: list[list[int]]) -> list[list[int]]:
    oracle = load_oracle(TINY_MOE)
    return [greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts]


def test_there_are_twenty_prompts_and_no_two_alike(prompts: list[list[int]]) -> None:
    assert len({tuple(prompt) for prompt in prompts}) == 20


@pytest.mark.slow
def test_one_rank_alone_and_under_load(prompts: list[list[int]], wanted: list[list[int]]) -> None:
    engine = build(TINY_MOE, num_experts=16)
    for prompt, want in zip(prompts, wanted, strict=True):
        assert run(engine, [request("alone", prompt, NUM_TOKENS)]).tokens["alone"] == want
    together = run(engine, [request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)])
    assert [together.tokens[str(i)] for i in range(len(prompts))] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dispatcher"), [(2, "fabric"), (4, "fabric"), (4, "torch")])
def test_ranks_that_share_the_experts(
    prompts: list[list[int]], wanted: list[list[int]], world_size: int, dispatcher: str
) -> None:
    shares: list[list[tuple[str, list[int], int, dict[str, float]]]] = [[] for _ in range(world_size)]
    for i, prompt in enumerate(prompts):
        shares[i % world_size].append((str(i), prompt, NUM_TOKENS, {"temperature": 0.0}))
    results = run_world(TINY_MOE, shares, num_experts=16, hidden=256, dispatcher=dispatcher)
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    assert [tokens[str(i)] for i in range(len(prompts))] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dispatcher"), [(2, "fabric"), (4, "fabric"), (4, "torch")])
def test_one_request_in_a_fleet_of_idle_ranks(
    prompts: list[list[int]], wanted: list[list[int]], world_size: int, dispatcher: str
) -> None:
    alone = [("a", prompts[0], NUM_TOKENS, {"temperature": 0.0})]
    results = run_world(TINY_MOE, [[]] * (world_size - 1) + [alone], num_experts=16, hidden=256, dispatcher=dispatcher)
    assert results[-1].tokens["a"] == wanted[0]
