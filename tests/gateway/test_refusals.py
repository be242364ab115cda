"""Every refusal has its status, an OpenAI error body, and the name of the field."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegahpc.config import ConfigError, ModelConfig
from pegahpc.gateway.appkeys import MODEL
from pegahpc.gateway.errors import ApiError
from pegahpc.gateway.fields import ChatFields, CompletionFields
from pegahpc.gateway.model import ServedModel
from pegahpc.gateway.no_ops import NO_OPS
from pegahpc.gateway.openai import Generation, parse_chat, parse_completion
from pegahpc.gateway.text_files import check_text_files
from pegahpc.wire.messages import (
    Aborted,
    BadRequest,
    CacheBudget,
    ContextLength,
    Draining,
    Failed,
    Rejected,
    Request,
    RequestUpdate,
    Terminal,
)
from tests.gateway.conftest import TINY, Serve, Served
from tests.gateway.fake_engine import updates_for

HI = {"role": "user", "content": "hi"}

BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [HI, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{**HI, "name": "ann"}]}, "messages[0].name"),
    ({"messages": [{**HI, "colour": 1}]}, "messages[0].colour"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**80}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [3072]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"every_word": True}}, "stream_options.every_word"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"user": 7}, "user"),
    ({"stop_token_ids": [7] * 129}, "stop_token_ids"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 2.0}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"3072": 1}}, "logit_bias"),
    ({"logit_bias": {str(9 * 10**30): 1}}, "logit_bias"),
    ({"logit_bias": {str(idx): 1 for idx in range(1025)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 513}, "min_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": "hi"}, "prompt"),
    ({"no_such_field": None}, "no_such_field"),
]

BAD_COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": ["a", None]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], [3072]]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [3072]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"echo": 1}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"max_tokens": 0, "max_completion_tokens": 1, "echo": True}, "max_completion_tokens"),
    ({"messages": [HI]}, "messages"),
]


def is_openai_error(body: dict[str, Any]) -> bool:
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


async def test_a_field_that_cannot_be_honoured_is_refused_by_name_and_never_reaches_a_rank(served: Served) -> None:
    for fields, param in BAD_CHAT_FIELDS:
        status, body = await served.chat(**fields)
        assert (status, body["error"]["param"]) == (400, param), (fields, body)
        assert param in body["error"]["message"]
        assert is_openai_error(body)
    for fields, param in BAD_COMPLETION_FIELDS:
        status, body = await served.complete(**fields)
        assert (status, body["error"]["param"]) == (400, param), (fields, body)
        assert param in body["error"]["message"]
        assert is_openai_error(body)
    assert served.engine.requests == []


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
field_names = sorted({*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__, *NO_OPS, "model", "unknown"})


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(field_names), json_values, max_size=4), st.sampled_from(["chat", "text"]))
def test_any_document_is_a_generation_or_a_refusal_that_names_one_of_its_fields(
    fields: dict[str, Any], kind: str
) -> None:
    parse = parse_chat if kind == "chat" else parse_completion
    document = {"model": "tiny-moe", **({"messages": [HI]} if kind == "chat" else {"prompt": "x"})} | fields
    try:
        assert isinstance(parse(json.dumps(document).encode(), "tiny-moe"), Generation)
    except ApiError as error:
        assert error.status in (400, 404)
        assert re.split(r"[.\[]", error.body.param or "")[0] in document
        assert (error.body.param or "") in error.body.message


async def test_fields_at_the_value_that_asks_for_nothing_are_accepted(served: Served) -> None:
    status, body = await served.chat(
        n=1, best_of=1, presence_penalty=0, frequency_penalty=0.0, logprobs=False, top_logprobs=None, logit_bias={},
        tools=[], tool_choice="none", response_format={"type": "text"}, echo=False, suffix=None, user="ann",
        max_tokens=None, stop=None, seed=None, stream_options=None, store=False,
        messages=[{**HI, "name": None}, {"role": "assistant", "content": "ok", "tool_calls": None, "refusal": None}],
    )  # fmt: skip
    assert status == 200, body


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'"x"', b"\xff", b'{"model":NaN}', b'{"a":"\\ud800"}', b"[" * 100_000, b'{"model": 1e999}'],
)
async def test_a_body_that_is_no_json_object_is_refused(served: Served, data: bytes) -> None:
    async with served.http.post(served.url + "/v1/completions", data=data) as response:
        body = await response.json()
    assert (response.status, body["error"]["code"]) == (400, "invalid_json")


async def test_a_body_whose_compression_is_broken_is_refused(served: Served) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with served.http.post(served.url + "/v1/completions", data=b"nonsense" * 9, headers=headers) as response:
        assert response.status == 400


async def test_a_required_field_that_is_missing_is_named(served: Served) -> None:
    for path, body, param in [
        ("chat/completions", {"messages": [HI]}, "model"),
        ("chat/completions", {"model": "tiny-moe"}, "messages"),
        ("completions", {"model": "tiny-moe"}, "prompt"),
    ]:
        status, answer = await served.post("/v1/" + path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert "required" in answer["error"]["message"]


async def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await served.client.completions.create(model="gpt-7", prompt="x")
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        await served.client.models.retrieve("gpt-7")


async def test_a_prompt_that_cannot_fit_the_context_is_refused_with_the_numbers(served: Served) -> None:
    for fields in ({"prompt": [7] * 512}, {"prompt": [7] * 500, "max_tokens": 13}, {"prompt": "a b " * 2000}):
        status, body = await served.complete(**fields)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["param"] == "prompt"
        assert "512" in body["error"]["message"]
    assert served.engine.requests == []
    status, _ = await served.complete(prompt=[7] * 500, max_tokens=12)
    assert status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 100_000: 1},
        {"messages": [{**HI, "y" * 100_000: 1}]},
        {"model": "z" * 100_000},
        {"messages": [{**HI, "role": "w" * 100_000}]},
        {"stream": True, "stream_options": {"v" * 100_000: 1}},
    ],
)
async def test_what_a_client_sends_does_not_come_back_whole(served: Served, fields: dict[str, Any]) -> None:
    status, body = await served.chat(**fields)
    assert status in (400, 404)
    assert is_openai_error(body)
    assert len(body["error"]["message"]) < 350 and len(body["error"]["param"]) <= 203


async def test_unknown_paths_and_methods_are_openai_errors(served: Served) -> None:
    async with served.http.get(served.url + "/v1/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_url")
    async with served.http.get(served.url + "/v1/completions") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")


async def test_a_body_over_the_limit_is_too_large(serve: Serve) -> None:
    async with serve("gateway.max_body_bytes=2048") as served:
        status, body = await served.complete(prompt="x" * 3000)
        assert (status, body["error"]["code"]) == (413, "request_too_large")


TERMINALS: list[tuple[Terminal, int, str]] = [
    (Rejected(ContextLength(prompt_tokens=5, max_tokens=9, limit=10)), 400, "context_length_exceeded"),
    (Rejected(CacheBudget(tokens=900, limit=80)), 400, "cache_budget_exceeded"),
    (Rejected(BadRequest(param="top_k", message="not here")), 400, "invalid_value"),
    (Rejected(Draining()), 503, "draining"),
    (Failed("non-finite logits at position 7"), 500, "engine_failed"),
    (Aborted(), 500, "engine_failed"),
]


@pytest.mark.parametrize(("terminal", "status", "code"), TERMINALS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_each_terminal_of_the_wire_has_its_status(
    served: Served, terminal: Terminal, status: int, code: str, is_streamed: bool
) -> None:
    served.engine.script = lambda request: [RequestUpdate(id=request.id, terminal=terminal)]
    got, body = await served.chat(stream=is_streamed)
    assert (got, body["error"]["code"]) == (status, code)
    assert is_openai_error(body)


async def test_a_failure_after_the_first_token_is_an_event_of_the_stream_and_its_last(served: Served) -> None:
    def fail(request: Request) -> list[RequestUpdate]:
        first, *_ = updates_for(request, [[70], [2]])
        return [first, RequestUpdate(id=request.id, terminal=Failed("non-finite logits at position 7"))]

    served.engine.script = fail
    served.engine.pause_s = 0.05
    stream = await served.client.chat.completions.create(
        model="tiny-moe", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="non-finite logits at position 7"):
        async for _ in stream:
            pass
    body = {"model": "tiny-moe", "prompt": "x", "stream": True}
    async with served.http.post(served.url + "/v1/completions", json=body) as response:
        events = (await response.text()).strip().split("\n\n")
    assert events[-1].startswith('data: {"error":')
    assert "data: [DONE]" not in events


async def test_an_answer_with_a_hole_in_it_is_an_error_and_not_an_answer(served: Served) -> None:
    served.engine.script = lambda request: updates_for(request, [[70], [71], [2]])[::2]
    status, body = await served.chat()
    assert status == 500
    assert "lost" in body["error"]["message"]


async def test_a_chat_with_a_model_without_a_template_is_refused_clearly(serve: Serve, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    async with serve(f"model.path={tmp_path}") as served:
        status, body = await served.chat()
        assert (status, body["error"]["code"]) == (400, "no_chat_template")
        assert (await served.complete())[0] == 200


async def test_a_fault_of_the_gateway_itself_is_a_500_that_tells_nothing_internal(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a secret of the house")

    monkeypatch.setattr(served.app[MODEL], "plan", fail)
    status, body = await served.chat()
    assert (status, body["error"]["code"], body["error"]["type"]) == (500, "internal_error", "server_error")
    assert "secret" not in body["error"]["message"]
    assert "a secret of the house" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged"),
        ("chat_template.jinja", "{% if %}", "the chat template cannot be used"),
        ("tokenizer_config.json", '{"chat_template": [7]}', "chat_template is of no known form"),
        ("tokenizer_config.json", '{"chat_template": "{{ x | no_such_filter }}"}', "the chat template cannot be used"),
        ("tokenizer_config.json", '{"bos_token": {}}', "tokenizer_config.json is damaged"),
    ],
)
def test_a_damaged_tokenizer_file_is_named_before_anything_is_served(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    for needed in ("config.json", "tokenizer.json"):
        (tmp_path / needed).write_bytes((TINY / needed).read_bytes())
    (tmp_path / name).write_text(content)
    config = ModelConfig(path=str(tmp_path), name="x", max_model_len=9)

    def serve() -> None:
        ServedModel(config, default_max_tokens=1, page_tokens=16, max_body_bytes=4096).warm_up()

    def check() -> None:
        check_text_files(tmp_path)

    for read in (check, serve):
        with pytest.raises(ConfigError, match=r"model\.path: ") as raised:
            read()
        assert said in str(raised.value)
