"""The same engine on a CUDA device, by the torch backends: inside the gate in float32, right answers in bfloat16.

And the sampler: the CPU's draws and ranks, alone and in a batch.
"""

from typing import Any

import pytest
import torch
from engines import logits_by_chunks, request, resolved, run
from oracles import TINY_MOE, load_oracle, oracle_logits
from tokenizers import Tokenizer

from pegahpc.engine.build import build_engine
from pegahpc.engine.logit_edits import LogitEdits
from pegahpc.engine.logprobs import Asked, token_logprobs
from pegahpc.engine.loop import Engine
from pegahpc.engine.sampler import Draw, sample
from pegahpc.moe.dispatch import LocalDispatcher
from pegahpc.rank import RankContext
from pegahpc.wire.messages import Sampling

pytestmark = pytest.mark.gpu
ON_GPU = RankContext(rank=0, world_size=1, tray=0, num_trays=1, local_rank=0, device="cuda:0", bind_host="127.0.0.1")


def build(*overrides: str) -> Engine:
    fleet = resolved(TINY_MOE, "cluster.device=cuda", *overrides)
    return build_engine(fleet, ON_GPU, dispatcher=LocalDispatcher(16), progress=lambda stage, done: None)


def test_float32_is_inside_the_gate_by_every_path() -> None:
    tokens = [1, *range(100, 160)]
    want = oracle_logits(load_oracle(TINY_MOE), tokens)
    torch.set_float32_matmul_precision("highest")
    engine = build("engine.dtype=float32")
    for chunks in ([64], [7], [1]):
        (got,) = logits_by_chunks(engine, [tokens], chunks)
        assert float((got.cpu() - want).abs().max() / (want.max() - want.min())) <= 2e-4


def test_bfloat16_answers_a_sum() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_MOE / "tokenizer.json"))
    prompt = tokenizer.encode("<|bos|><|user|>What is 3 plus 4?<|assistant|>", add_special_tokens=False).ids
    collected = run(build("engine.dtype=bfloat16"), [request("a", prompt, 20, stop=(2,))])
    assert tokenizer.decode(collected.tokens["a"]) == "3 plus 4 is 7."


VOCABS = [3072, 129_280]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 40, "min_p": 0.02}, {"min_p": 0.1},
    {"temperature": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
     "logit_bias": ((5, 4.0),)},
]  # fmt: skip


def rows_to_sample(vocab: int, num_rows: int = 36) -> tuple[torch.Tensor, list[Draw], torch.Tensor]:
    """Logits with many equals, as bfloat16 gives them; every setting; a few suppressed ids."""
    logits = (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4).bfloat16().float()
    all_sampling = [Sampling(seed=row, **SETTINGS[row % len(SETTINGS)]) for row in range(num_rows)]
    draws = [Draw(each, 7, LogitEdits.wanted_by(each, [1, 2, 3], most=9), (9,) * (row % 2))
             for row, each in enumerate(all_sampling)]  # fmt: skip
    return logits, draws, torch.arange(vocab - 40, vocab)


@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_those_of_the_cpu_alone_and_in_a_batch(vocab: int) -> None:
    logits, draws, suppressed = rows_to_sample(vocab)
    want = sample(logits.clone(), draws, suppressed)
    assert sample(logits.cuda(), draws, suppressed.cuda()) == want
    for row, draw in enumerate(draws):
        assert sample(logits[row : row + 1].cuda(), [draw], suppressed.cuda())[0] == [want[0][row]]


@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_are_those_of_the_cpu_and_a_rows_bits_its_own(vocab: int) -> None:
    logits, _, suppressed = rows_to_sample(vocab)
    asked = [Asked((997 * row) % vocab, row % 21) for row in range(len(logits))]
    want = token_logprobs(logits.clone(), asked, suppressed)
    got = token_logprobs(logits.cuda(), asked, suppressed.cuda())
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
    for row, each in enumerate(asked):
        assert token_logprobs(logits[row : row + 1].cuda(), [each], suppressed.cuda()) == [got[row]]
