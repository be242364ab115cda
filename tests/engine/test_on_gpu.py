"""The same engine on a CUDA device, by the torch backends: inside the gate in float32, right answers in bfloat16."""

import pytest
import torch
from engines import logits_by_chunks, request, resolved, run
from oracles import TINY_MOE, load_oracle, oracle_logits
from tokenizers import Tokenizer

from pegahpc.engine.build import build_engine
from pegahpc.engine.loop import Engine
from pegahpc.moe.dispatch import LocalDispatcher
from pegahpc.rank import RankContext

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
