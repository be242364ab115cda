"""What is asked: seeded, distinct, alike in every repeat but for the prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegahpc.bench.lengths import parse_lengths
from pegahpc.bench.points import Closed, Open, Replay
from pegahpc.bench.prompts import TokenMaterial, WordMaterial
from pegahpc.bench.trace import read_trace
from pegahpc.bench.workload import Conversation, Workload, WorkloadSpec, batch_sha256, shared_tokens
from pegahpc.config import ConfigError

TOKENS = TokenMaterial(300, frozenset({0, 1, 2}))


def spec(**given: Any) -> WorkloadSpec:
    fields: dict[str, Any] = {
        "seed": 7,
        "num_requests": 12,
        "input_tokens": parse_lengths("-i", "uniform:low=4,high=9"),
        "output_tokens": parse_lengths("-t", "geometric:mean=20"),
    }
    return WorkloadSpec(**(fields | given))


def lengths(batch: list[Conversation]) -> list[list[tuple[int, int]]]:
    return [[(len(turn.prompt), turn.output_tokens) for turn in each.turns] for each in batch]


def prompts(batch: list[Conversation]) -> list[object]:
    return [turn.prompt for each in batch for turn in each.turns]


def test_the_same_seed_asks_the_same_and_another_seed_does_not() -> None:
    first, again = (Workload(spec(), TOKENS).batch(Closed(2), 0) for _ in range(2))
    assert first == again and batch_sha256(first) == batch_sha256(again)
    assert batch_sha256(Workload(spec(seed=8), TOKENS).batch(Closed(2), 0)) != batch_sha256(first)


def test_repeats_and_points_have_equal_lengths_and_not_one_prompt_in_common() -> None:
    """A prompt that was asked before would be answered by the prefix cache."""
    workload = Workload(spec(), TOKENS)
    batches = [workload.batch(point, repeat) for point in (Closed(1), Closed(4)) for repeat in (0, 1)]
    assert all(lengths(batch) == lengths(batches[0]) for batch in batches)
    every = [json.dumps(prompt) for batch in [*batches, workload.warmup(Closed(1), 5)] for prompt in prompts(batch)]
    assert len(set(every)) == len(every) == 4 * 12 + 5


def test_prompts_are_distinct_even_where_chance_would_repeat_them() -> None:
    two_tokens = spec(num_requests=200, input_tokens=parse_lengths("-i", "2"))
    batch = Workload(two_tokens, TokenMaterial(20)).batch(Closed(1), 0)  # 400 pairs: chance alone repeats some 40
    assert len({json.dumps(prompt) for prompt in prompts(batch)}) == 200


def test_too_few_different_prompts_are_a_refusal_not_a_repetition() -> None:
    one_token = spec(num_requests=40, input_tokens=parse_lengths("-i", "1"))
    with pytest.raises(ConfigError, match="--input-tokens: prompts of 1 tokens are too short"):
        Workload(one_token, TokenMaterial(20)).batch(Closed(1), 0)


def test_special_tokens_are_never_drawn() -> None:
    batch = Workload(spec(num_requests=200), TOKENS).batch(Closed(1), 0)
    drawn = {token for prompt in prompts(batch) if isinstance(prompt, list) for token in prompt}
    assert drawn.isdisjoint({0, 1, 2}) and max(drawn) == 299 and min(drawn) == 3


def test_shared_prefixes_take_turns_and_are_new_in_each_repeat() -> None:
    workload = Workload(spec(shared_prefix=16, num_prefixes=3), TOKENS)
    begins = [[tuple(prompt[:16]) for prompt in prompts(workload.batch(Closed(1), repeat)) if isinstance(prompt, list)]
              for repeat in (0, 1)]  # fmt: skip
    assert len(set(begins[0])) == 3 and begins[0][:3] == begins[0][3:6]
    assert set(begins[0]).isdisjoint(begins[1])


def test_what_a_prefix_cache_may_know_is_the_shared_prefix_and_nothing_else() -> None:
    assert {each.reusable_tokens for each in Workload(spec(), TOKENS).batch(Closed(1), 0)} == {0}
    with_prefix = Workload(spec(shared_prefix=16), TOKENS).batch(Closed(1), 0)
    assert {each.reusable_tokens for each in with_prefix} == {16}
    texts = [Workload(spec(shared_prefix=length), WordMaterial()).batch(Closed(1), 0) for length in (0, 16)]
    assert [{each.reusable_tokens for each in batch} for batch in texts] == [{0}, {None}]  # 16 words are not counted
    assert shared_tokens([[1, 2, 3], [4], [1, 2, 5, 6], "text"]) == 2


def test_conversations_have_turns_and_requests_are_counted_in_turns() -> None:
    batch = Workload(spec(num_turns=4), TOKENS).batch(Closed(1), 0)
    assert [len(each.turns) for each in batch] == [4, 4, 4]
    with pytest.raises(ConfigError, match="--turns: 5 turns do not divide 12 requests"):
        spec(num_turns=5)


def test_arrivals_have_the_same_pattern_in_each_repeat_and_ascend() -> None:
    workload = Workload(spec(), TOKENS)
    times = [[each.at_s for each in workload.batch(Open(4.0), repeat)] for repeat in (0, 1)]
    assert times[0] == times[1] == sorted(times[0])
    assert [each.at_s for each in workload.batch(Closed(4), 0)] == [0.0] * 12


def test_words_make_texts_of_so_many_words() -> None:
    batch = Workload(spec(), WordMaterial()).batch(Closed(1), 0)
    wanted = [length for each in lengths(Workload(spec(), TOKENS).batch(Closed(1), 0)) for length, _ in each]
    assert [len(str(prompt).split()) for prompt in prompts(batch)] == wanted


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*each: object) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in each))
        return path

    return lines


def test_a_trace_is_replayed_at_its_times_and_lengths(write: Write) -> None:
    trace = read_trace(
        write(
            {"timestamp": 14.0, "input_tokens": 5, "output_tokens": 3},
            {"timestamp": 10.0, "prompt": [5, 6, 7], "output_tokens": 9},
            {"timestamp": 11.0, "input_tokens": 4},
        )
    )
    constant = parse_lengths("-t", "20")
    workload = Workload(spec(num_requests=0, trace=trace, output_tokens=constant), TOKENS)
    batch = workload.batch(Replay(2.0), 0)
    assert [each.at_s for each in batch] == [0.0, 0.5, 2.0]
    assert lengths(batch) == [[(3, 9)], [(4, 20)], [(5, 3)]]
    assert batch[0].turns[0].prompt == [5, 6, 7]
    head = Workload(spec(num_requests=2, trace=trace, output_tokens=constant), TOKENS)
    assert len(head.batch(Replay(), 0)) == 2


def test_identical_prompts_of_a_trace_are_refused_and_counted_when_allowed(write: Write) -> None:
    trace = read_trace(write(*[{"timestamp": 0, "prompt": [5, 6]}, {"timestamp": 1, "prompt": [5, 6]}]))
    with pytest.raises(ConfigError, match=r"a prompt comes twice\. .* --allow-identical-prompts"):
        Workload(spec(num_requests=0, trace=trace), TOKENS).batch(Replay(), 0)
    allowed = Workload(spec(num_requests=0, trace=trace, allows_twins=True), TOKENS)
    allowed.batch(Replay(), 0)
    assert allowed.num_twins == 1


def test_a_trace_with_prompts_cannot_be_repeated_since_its_prompts_would_come_twice(write: Write) -> None:
    workload = Workload(spec(num_requests=0, trace=read_trace(write({"timestamp": 0, "prompt": [5, 6]}))), TOKENS)
    workload.batch(Replay(), 0)
    with pytest.raises(ConfigError, match="a prompt comes twice"):
        workload.batch(Replay(), 1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: "),
        ({"timestamp": 0}, "line 2: either prompt or input_tokens"),
        ({"timestamp": 0, "prompt": "a", "input_tokens": 3}, "line 2: either prompt or input_tokens"),
        ({"timestamp": 0, "prompt": []}, "line 2: "),
        ({"timestamp": 0, "input_tokens": 0}, "line 2: "),
        ({"timestamp": "x", "input_tokens": 1}, "line 2: "),
        ({"timestamp": 0, "input_tokens": 1, "hash_ids": []}, "unknown field `hash_ids`"),
        ({"timestamp": 0, "prompt": "text"}, "both texts and token ids"),
    ],
)
def test_a_line_that_is_wrong_is_refused_by_its_number(write: Write, line: object, says: str) -> None:
    path = write({"timestamp": 0, "prompt": [5]}, line)
    with pytest.raises(ConfigError, match=r"^--trace: trace\.jsonl") as refused:
        read_trace(path)
    assert says in str(refused.value)


def test_an_empty_trace_or_none_is_refused(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(write(""))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
