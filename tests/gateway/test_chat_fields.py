"""What a chat may tell the model's template, from the body to the tokens that a rank gets."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.gateway.conftest import TINY, Serve, Served

TEMPLATE = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}
{%- if reasoning_effort is defined %}{% if reasoning_effort not in ("low", "high") %}
{{- raise_exception("reasoning_effort is low or high") }}{% endif %}({{ reasoning_effort }}){% endif %}"""
ANN = {"role": "user", "content": "hi"}
BOB = {"role": "assistant", "content": "The answer is"}


@pytest.fixture
async def thinker(serve: Serve, tmp_path: Path) -> AsyncIterator[Served]:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    async with serve(f"model.path={tmp_path}") as served:
        yield served


async def test_each_field_of_the_template_is_in_the_prompt(thinker: Served, tokenizer: Tokenizer) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, "<user>hi<assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "<user>hi<assistant><think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>hi<assistant>"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "<user>hi<assistant>(high)"),
        ({"reasoning_effort": "low"}, "<user>hi<assistant>(low)"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"messages": [ANN, BOB], "continue_final_message": True}, "<user>hi<assistant>The answer is"),
        (
            {"messages": [ANN, BOB], "continue_final_message": True, "add_generation_prompt": False},
            "<user>hi<assistant>The answer is",
        ),
        (dict.fromkeys(("add_generation_prompt", "continue_final_message", "reasoning_effort")), "<user>hi<assistant>"),
    ]
    for fields, _ in asked:
        status, body = await thinker.chat(**fields)
        assert status == 200, body
    sent = [request.prompt_tokens for request in thinker.engine.requests]
    assert sent == [tokenizer.encode(text).ids for _, text in asked]


async def test_what_the_template_cannot_honour_is_refused_by_name_and_never_reaches_a_rank(thinker: Served) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"chat_template_kwargs": {"enable_thinkng": True}}, "chat_template_kwargs.enable_thinkng"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": 7}, "chat_template_kwargs"),
        ({"reasoning_effort": "medium"}, "messages"),  # the template's own words
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ]
    for fields, param in refused:
        status, body = await thinker.chat(**fields)
        assert (status, body["error"]["param"]) == (400, param), (fields, body)
    assert thinker.engine.requests == []


async def test_a_template_without_variables_takes_none_and_says_so(served: Served) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ]
    for fields, param in refused:
        status, body = await served.chat(**fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["message"].endswith("it has: none")
    assert (await served.chat(chat_template_kwargs={}))[0] == 200
    assert (await served.complete(reasoning_effort="low"))[1]["error"]["param"] == "reasoning_effort"
