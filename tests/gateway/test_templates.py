"""Chat templates render as transformers renders them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pegahpc.gateway.errors import ApiError
from pegahpc.gateway.templates import ChatTemplate
from pegahpc.gateway.tokenizer import TextCodec, chat_template_source
from tests.gateway.conftest import TINY

os.environ["HF_HUB_OFFLINE"] = "1"

CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  x 世 "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
]
BLOCKS = """
{%- set ns = namespace(n=0) %}
{{ bos_token }}
    {% for m in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
[{{ m.role | upper }}] {{ m.content | trim | tojson }}
    {% if m.role == "assistant" %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}
    {% endfor %}
{% if tools is not none %}tools{% endif %}
{% if add_generation_prompt %}go {{ ns.n }}{% endif %}
"""


def by_transformers(folder: Path, messages: list[dict[str, str]]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def ours(folder: Path, messages: list[dict[str, str]]) -> str:
    codec = TextCodec(folder)
    source = chat_template_source(folder, codec)
    assert source is not None
    return ChatTemplate(source, codec.special_tokens()).render(messages)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize("messages", CHATS)
def test_the_shipped_template_renders_as_in_transformers(messages: list[dict[str, str]]) -> None:
    assert ours(TINY, messages) == by_transformers(TINY, messages)


@pytest.mark.parametrize("messages", CHATS)
def test_a_template_file_goes_before_the_config_and_trims_its_blocks(
    folder: Path, messages: list[dict[str, str]]
) -> None:
    (folder / "chat_template.jinja").write_text(BLOCKS)
    text = ours(folder, messages)
    assert text == by_transformers(folder, messages)
    assert "<|bos|>" in text


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert ours(folder, CHATS[0]) == by_transformers(folder, CHATS[0]) == "d"


def test_prompt_tokens_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(TINY).apply_chat_template(
        CHATS[1], add_generation_prompt=True, return_dict=False
    )
    assert TextCodec(TINY).encode(ours(TINY, CHATS[1]), add_special_tokens=False) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_a_refusal(source: str) -> None:
    with pytest.raises(ApiError) as raised:
        ChatTemplate(source, {}).render(CHATS[0])
    assert raised.value.status == 400
    if "alternate" in source:
        assert "roles must alternate" in raised.value.body.message
