"""docs/sampling.md says what the code does, of every field: no row without code, no code without a row."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams

from pegahpc.gateway.errors import ApiError
from pegahpc.gateway.fields import ChatFields, CompletionFields, Message, StreamOptions
from pegahpc.gateway.no_ops import CHAT_NO_OPS, COMPLETION_NO_OPS, MESSAGE_NO_OPS, STREAM_NO_OPS
from pegahpc.gateway.openai import Generation, parse_chat, parse_completion

DOCUMENT = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
HI = {"role": "user", "content": "hi"}
BASE: dict[str, dict[str, Any]] = {
    "chat": {"model": "tiny-moe", "messages": [HI]},
    "completions": {"model": "tiny-moe", "prompt": "hi"},
}
NO_OPS_OF = {"chat": CHAT_NO_OPS, "completions": COMPLETION_NO_OPS}


class Row(NamedTuple):
    """One field at one endpoint, as the document has it."""

    endpoint: str
    field: str
    cells: tuple[str, ...]

    @property
    def values(self) -> str:
        return self.cells[0]


def rows(heading: str) -> list[Row]:
    """The table under a heading; a row of both endpoints is two."""
    _, _, after = DOCUMENT.partition(f"\n## {heading}\n")
    table = after.partition("\n## ")[0]
    found = []
    for line in table.splitlines():
        if line.startswith("| `"):
            field, endpoint, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            for each in ("chat", "completions") if endpoint == "both" else (endpoint,):
                found.append(Row(each, field.strip("` "), tuple(cells)))
    assert found, heading
    return found


HONOURED = rows("Honoured")
NOTED = rows("Accepted, for the client's own records")
NO_OPS = rows("Accepted at the value that asks for nothing, else refused")


def parse(endpoint: str, fields: Mapping[str, Any]) -> Generation:
    read = parse_chat if endpoint == "chat" else parse_completion
    return read(json.dumps(BASE[endpoint] | dict(fields)).encode(), "tiny-moe")


def placed(field: str, value: Any) -> dict[str, Any]:
    """The fields of a body that has the value where a row's name says."""
    name = field.rpartition(".")[2]
    if field.startswith("messages[]."):
        return {"messages": [HI | {name: value}]}
    if field.startswith("stream_options."):
        return {"stream": True, "stream_options": {"include_usage": True} | {name: value}}
    return {field: value}


def param_of(field: str) -> str:
    return field.replace("[]", "[0]")


def documented(endpoint: str, table: list[Row]) -> set[str]:
    return {row.field for row in table if row.endpoint == endpoint}


# What a field needs beside it, and what its values are in words.
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("chat", "top_logprobs"): {"logprobs": True},
    ("completions", "max_tokens"): {"echo": True},
    ("chat", "stream_options"): {"stream": True},
    ("completions", "stream_options"): {"stream": True},
}
IN_WORDS: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["tiny-moe"], ["gpt-7", 7, ["tiny-moe"]]),
    "messages": ([[HI], [HI] * 9], [[], "hi", HI, [7]]),
    "messages[].role": (["system", "developer", "user", "assistant"], ["tool", "", 7]),
    "messages[].content": (["", "hi", [{"type": "text", "text": "a"}]], [7, {}, ["a"], [{"type": "image_url"}]]),
    "chat_template_kwargs": ([{}, {"a": 1}], [7, [], "a"]),
    "reasoning_effort": (["low", "whatever"], [7, True, []]),
    "prompt": (["hi", [5], [5, 6], ["a"], ["a", "b"], [[5], [6, 7]], ["a"] * 128], [7, {}, [], ["a", 7], ["a"] * 129]),
    "logit_bias": ([{}, {"5": -100}, {"5": 100, "6": 0.5}], [[], {"5": 100.1}, {"a": 1}, {"-1": 1}, {"5": "1"}]),
    "stop": (["a", [], ["a"], ["a", "b", "c", "d"]], ["", ["a", ""], 7, [7], ["a"] * 5]),
    "stop_token_ids": ([[], [5], [5] * 128], [5, ["5"], [-1], [5] * 129]),
    "stream_options": ([{}, {"include_usage": True}], [7, [], {"unknown": True}]),
}
BOOLEAN: tuple[list[Any], list[Any]] = ([True, False], [0, 1, "true", [], {}])
TEXT: tuple[list[Any], list[Any]] = (["", "x"], [0, True, [], {}])


def examples(row: Row) -> tuple[list[Any], list[Any]]:
    """Values that a row's words allow, and values that they do not: ends of intervals and what lies beyond."""
    if row.field in IN_WORDS:
        return IN_WORDS[row.field]
    if row.values in ("boolean", "text"):
        return BOOLEAN if row.values == "boolean" else TEXT
    interval = re.fullmatch(r"(integer|number) ([\[(])(\S+), (\S+)([\])])", row.values)
    assert interval, f"{row.field}: {row.values} is neither a type that is known here nor in IN_WORDS"
    kind, opening, low, high, closing = interval.groups()
    step = 1 if kind == "integer" else 1e-6
    lowest = json.loads(low)
    good: list[Any] = []
    bad: list[Any] = ["1", True, [], {}, *([lowest + 0.5] if kind == "integer" else [])]
    (good if opening == "[" else bad).append(lowest)
    good.append(lowest + step)
    bad.append(lowest - step)
    if high != "∞":
        highest = json.loads(high)
        (good if closing == "]" else bad).append(highest)
        good.append(highest - step)
        bad.append(highest + step)
    return good, bad


def ids(table: list[Row]) -> list[Any]:
    return [pytest.param(row, id=f"{row.endpoint}-{row.field}") for row in table]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_field_of_the_code_has_a_row_and_every_row_has_code(endpoint: str) -> None:
    kind = ChatFields if endpoint == "chat" else CompletionFields
    honoured = set(kind.__struct_fields__) | {f"stream_options.{name}" for name in StreamOptions.__struct_fields__}
    no_ops = set(NO_OPS_OF[endpoint]) | {f"stream_options.{name}" for name in STREAM_NO_OPS}
    if endpoint == "chat":
        honoured |= {f"messages[].{name}" for name in Message.__struct_fields__}
        no_ops |= {f"messages[].{name}" for name in MESSAGE_NO_OPS}
    assert documented(endpoint, HONOURED) | documented(endpoint, NOTED) == honoured
    assert documented(endpoint, NO_OPS) == no_ops
    assert len(HONOURED + NOTED + NO_OPS) == len({row[:2] for row in HONOURED + NOTED + NO_OPS})  # no row twice


@pytest.mark.parametrize(("endpoint", "params"), [("chat", ChatParams), ("completions", CompletionParams)])
def test_every_field_of_the_official_client_has_a_row(endpoint: str, params: type) -> None:
    official = set(params.__annotations__)
    assert len(official) > 15
    assert official <= documented(endpoint, HONOURED + NOTED + NO_OPS)


def defaults() -> Iterator[tuple[str, str, object]]:
    for endpoint, kind in (("chat", ChatFields), ("completions", CompletionFields)):
        for prefix, struct in (("", kind), ("stream_options.", StreamOptions), ("messages[].", Message)):
            for field in msgspec.structs.fields(struct):
                if prefix != "messages[]." or endpoint == "chat":
                    given = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
                    value = given() if callable(given) else given
                    yield endpoint, prefix + field.encode_name, "required" if field.required else value


def test_defaults_are_those_of_the_code() -> None:
    known = {(row.endpoint, row.field): row.cells[1] for row in HONOURED}
    for endpoint, field, value in defaults():
        if field != "user":
            expected = value if value == "required" else "—" if value is None else f"`{json.dumps(value)}`"
            assert known[endpoint, field] == expected, (endpoint, field)


@pytest.mark.parametrize("row", ids(HONOURED + NOTED))
def test_a_value_that_a_row_allows_is_taken_and_one_that_it_does_not_is_refused_by_the_fields_name(row: Row) -> None:
    good, bad = examples(row)
    beside = WITH.get((row.endpoint, row.field), {})
    for value in good:
        parse(row.endpoint, beside | placed(row.field, value))
    for value in bad:
        with pytest.raises(ApiError) as raised:
            parse(row.endpoint, beside | placed(row.field, value))
        assert raised.value.status in (400, 404), value
        assert (raised.value.body.param or "").startswith(param_of(row.field)), (value, raised.value.body)
        assert raised.value.body.message, value


@pytest.mark.parametrize("row", ids([row for row in HONOURED if row.field != "model"]))
def test_an_honoured_field_changes_what_is_asked_of_the_engines_or_shown(row: Row) -> None:
    good, _ = examples(row)
    beside = WITH.get((row.endpoint, row.field), {})
    plain = parse(row.endpoint, beside | ({"stream": True, "stream_options": {"include_usage": True}}
                                          if row.field == "stream_options.continuous_usage_stats" else {}))  # fmt: skip
    asked = [parse(row.endpoint, beside | placed(row.field, value)) for value in good]
    assert any(generation != plain for generation in asked)


@pytest.mark.parametrize("row", ids([row for row in HONOURED if row.cells[1] != "required"]))
def test_null_for_an_honoured_field_is_its_default(row: Row) -> None:
    beside = WITH.get((row.endpoint, row.field), {})
    if row.field.startswith("stream_options."):
        plain = {"stream": True, "stream_options": {"include_usage": row.field != "stream_options.include_usage"}}
        assert parse(row.endpoint, placed(row.field, None)) == parse(row.endpoint, plain)
    else:
        assert parse(row.endpoint, beside | {row.field: None}) == parse(row.endpoint, beside)


@pytest.mark.parametrize("row", ids(NOTED))
def test_a_noted_field_changes_nothing(row: Row) -> None:
    assert parse(row.endpoint, placed(row.field, "ann")) == parse(row.endpoint, {})


@pytest.mark.parametrize("row", ids(NO_OPS))
def test_a_field_that_is_not_honoured_is_taken_at_the_listed_values_and_at_no_other(row: Row) -> None:
    listed = [json.loads(value) for value in re.findall(r"`([^`]*)`", row.values)]
    name = row.field.rpartition(".")[2]
    of = {"messages[]": MESSAGE_NO_OPS, "stream_options": STREAM_NO_OPS}.get(row.field.rpartition(".")[0])
    assert list(map(repr, listed)) == list(map(repr, (of or NO_OPS_OF[row.endpoint])[name]))
    plain = parse(row.endpoint, placed("stream_options.include_usage", True) if "stream_" in row.field else {})
    for value in listed:
        assert parse(row.endpoint, placed(row.field, value)) == plain
    told = [json.dumps(value) for value in listed]
    for value in (None, True, False, 0, 1, 2, 0.5, "", "none", "x", [], ["x"], {}, {"type": "x"}, {"x": 1}):
        if json.dumps(value) not in told:
            with pytest.raises(ApiError) as raised:
                parse(row.endpoint, placed(row.field, value))
            assert (raised.value.status, raised.value.body.param) == (400, param_of(row.field)), value


@pytest.mark.parametrize("field", ["colour", "messages[].colour", "stream_options.colour"])
@pytest.mark.parametrize("value", [None, 7])
def test_a_field_that_has_no_row_is_refused_whatever_its_value(field: str, value: object) -> None:
    with pytest.raises(ApiError) as raised:
        parse("chat", placed(field, value))
    assert (raised.value.status, raised.value.body.param) == (400, param_of(field))
