"""bfloat16 against the official class in bfloat16, teacher-forced: the pick's regret and the best eight's logprobs.

Where few experts are chosen of many, rounding now and then flips a choice, and such a position moves by far more
than arithmetic does: on the shipped model the official class in bfloat16 stands 0.43 nats (p99) from itself in
float32. So the p99 limit there is 1.6 of that floor, as the table's 0.20 is 1.6 of the floor of the dense models that
it was measured on; a model that chooses all its experts has no such positions and is held to the table as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build, logits_by_chunks, request, run
from faults import FAULTS, engine_with
from oracles import SHAPE, TINY_MOE, load_oracle, oracle_logits, save_tiny, widen
from tokenizers import Tokenizer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from pegahpc.engine.loop import Engine

MAX_REGRET, MAX_MEAN, MAX_P99 = 0.20, 0.06, 0.20
TEXTS = [
    "<|bos|><|user|>Tell me a story about Tom and a dog.<|assistant|>", "<|bos|>Once upon a time, there was a",
    "<|bos|><|user|>What is 3 plus 4?<|assistant|>", "<|bos|>It was a cold morning, and the",
    "<|bos|><|user|>Write a short story with a kite.<|assistant|>", "<|bos|>One sunny day, Lily went to the",
]  # fmt: skip
CHUNKS = [20]  # six sequences together fit a step of 128 rows


@dataclass(frozen=True)
class Distance:
    """Nats, over all positions and the oracle's best eight tokens of each."""

    regret: float
    mean: float
    p99: float
    most: float

    @classmethod
    def between(cls, got: list[torch.Tensor], want: list[torch.Tensor]) -> Distance:
        got_TV, want_TV = torch.cat(got).log_softmax(-1), torch.cat(want).log_softmax(-1)
        best = want_TV.topk(8, dim=-1)
        regrets = best.values[:, 0] - want_TV.gather(1, got_TV.argmax(-1, keepdim=True))[:, 0]
        moved = (got_TV.gather(1, best.indices) - best.values).abs().flatten()
        return cls(float(regrets.max()), float(moved.mean()), float(moved.quantile(0.99)), float(moved.max()))

    def is_inside(self, max_p99: float) -> bool:
        return self.regret <= MAX_REGRET and self.mean <= MAX_MEAN and self.p99 <= max_p99


@dataclass(frozen=True)
class Case:
    """A checkpoint, the sequences that it is forced through, and what the official class says in bfloat16."""

    folder: Path
    sequences: list[list[int]]
    wanted: list[torch.Tensor]
    max_p99: float

    def engine(self) -> Engine:
        return build(self.folder, "engine.dtype=bfloat16", num_experts=16 if self.folder == TINY_MOE else 8)


def case_of(folder: Path, sequences: list[list[int]]) -> Case:
    oracle = load_oracle(folder, torch.bfloat16)
    return Case(folder, sequences, [oracle_logits(oracle, tokens) for tokens in sequences], MAX_P99)


@pytest.fixture(scope="module")
def shipped() -> Case:
    """Texts as the shipped model writes them."""
    tokenizer = Tokenizer.from_file(str(TINY_MOE / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    said = run(build(TINY_MOE, num_experts=16), [request(str(i), prompt, 60) for i, prompt in enumerate(prompts)])
    case = case_of(TINY_MOE, [prompt + said.tokens[str(i)] for i, prompt in enumerate(prompts)])
    exact = load_oracle(TINY_MOE)
    floor = Distance.between(case.wanted, [oracle_logits(exact, tokens) for tokens in case.sequences])
    print(f"floor: the official class in bfloat16 from itself in float32: {floor}")
    return Case(case.folder, case.sequences, case.wanted, max(MAX_P99, 1.6 * floor.p99))


def random_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 320, (count,), generator=generator).tolist() for count in (61, 17, 40, 1, 2)]


@pytest.fixture(scope="module")
def tiny_v2(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(save_tiny(tmp_path_factory.mktemp("v2"), "v2-greedy"), random_sequences())


@pytest.fixture(scope="module")
def tiny_v3(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Every expert is chosen: nothing flips."""
    folder = tmp_path_factory.mktemp("v3")
    changes: dict[str, Any] = {"q_lora_rank": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8,
                               "norm_topk_prob": True, "num_nextn_predict_layers": 0}  # fmt: skip
    config: Any = DeepseekV3Config(**(SHAPE | changes))
    model = DeepseekV3ForCausalLM(config)
    widen(model, 0)
    model.save_pretrained(folder)
    return case_of(folder, random_sequences())


@pytest.mark.parametrize("name", ["shipped", "tiny_v2", "tiny_v3"])
def test_bfloat16_is_inside_the_gate(name: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue(name)
    moved = Distance.between(logits_by_chunks(case.engine(), case.sequences, CHUNKS), case.wanted)
    print(f"{name}: {moved}, p99 limit {case.max_p99:.2f}")
    assert moved.is_inside(case.max_p99)


@pytest.mark.parametrize("name", ["shipped", "tiny_v2", "tiny_v3"])
def test_every_path_gives_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue(name)
    engine, tokens = case.engine(), case.sequences[0]
    (reference,) = logits_by_chunks(engine, [tokens], [64])
    for chunks in ([1], [7], [13, 1]):
        assert torch.equal(logits_by_chunks(engine, [tokens], chunks)[0], reference)
        assert torch.equal(logits_by_chunks(engine, case.sequences, chunks)[0], reference)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_gate_on_the_shipped_model(
    fault: Callable[[Any], None], shipped: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(fault, shipped.engine, monkeypatch)
    moved = Distance.between(logits_by_chunks(engine, shipped.sequences, CHUNKS), shipped.wanted)
    print(f"{fault.__name__}: {moved}, p99 limit {shipped.max_p99:.2f}")
    assert not moved.is_inside(shipped.max_p99)
