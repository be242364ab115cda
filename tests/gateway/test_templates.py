"""Chat templates render as transformers renders them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from pegahpc.config import ConfigError
from pegahpc.gateway.template_messages import Chat
from pegahpc.gateway.templates import ChatTemplate, TemplateRefusal
from pegahpc.gateway.text_files import chat_templates
from pegahpc.gateway.tokenizer import TextCodec
from tests.gateway.conftest import TINY

os.environ["HF_HUB_OFFLINE"] = "1"

Messages = list[dict[str, str]]

CHATS: list[Messages] = [
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
THINKING = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ style | default('') }}
{%- endif %}"""
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"


def by_transformers(folder: Path, messages: Messages, **fields: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **fields})


def ours(folder: Path, messages: Messages, **fields: Any) -> str:
    codec = TextCodec(folder)
    source = chat_templates(folder, codec)["default"]
    return ChatTemplate(source, codec.special_tokens).render(Chat(messages=messages, **fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    return tmp_path


def with_config(folder: Path, **fields: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("messages", CHATS)
def test_the_shipped_template_renders_as_in_transformers(messages: Messages) -> None:
    assert ours(TINY, messages) == by_transformers(TINY, messages)


@pytest.mark.parametrize("messages", CHATS)
def test_a_template_file_goes_before_the_config_and_trims_its_blocks(folder: Path, messages: Messages) -> None:
    (folder / "chat_template.jinja").write_text(BLOCKS)
    text = ours(folder, messages)
    assert text == by_transformers(folder, messages)
    assert "<|bos|>" in text


def test_a_template_file_is_enough_for_a_config_without_a_template(folder: Path) -> None:
    with_config(folder, chat_template=None)
    assert chat_templates(folder, TextCodec(folder)) == {}
    (folder / "chat_template.jinja").write_text(BLOCKS)
    assert ours(folder, CHATS[1]) == by_transformers(folder, CHATS[1])


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    with_config(folder, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert ours(folder, CHATS[0]) == by_transformers(folder, CHATS[0]) == "d"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    (folder / "chat_template.jinja").write_text("file")
    assert ours(folder, CHATS[0]) == by_transformers(folder, CHATS[0]) == "file"
    assert chat_templates(folder, TextCodec(folder)) == {"rag": "r", "default": "file"}


def test_named_templates_without_a_default_are_no_chat_template_in_transformers_either(folder: Path) -> None:
    with_config(folder, chat_template=[{"name": "tool_use", "template": "t"}])
    assert "default" not in chat_templates(folder, TextCodec(folder))
    with pytest.raises(ValueError, match="no default"):
        by_transformers(folder, CHATS[0])


@pytest.mark.parametrize("given", [7, [7], [{"name": "default"}], [{"name": "default", "template": 7}]])
def test_a_template_of_no_known_form_is_named(folder: Path, given: object) -> None:
    with_config(folder, chat_template=given)
    with pytest.raises(ConfigError, match=r"model\.path: .*chat_template is of no known form"):
        chat_templates(folder, TextCodec(folder))


@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "style": "[short]"}, {"style": None}]
)
def test_variables_of_the_template_are_honoured(folder: Path, variables: dict[str, Any]) -> None:
    (folder / "chat_template.jinja").write_text(THINKING)
    text = ours(folder, CHATS[0], variables=variables)
    assert text == by_transformers(folder, CHATS[0], **variables)
    assert ("<think>" in text) == (variables.get("enable_thinking") is False)


@pytest.mark.parametrize("name", ["enable_thinkng", "messages", "tools", "add_generation_prompt", "bos_token", "m"])
def test_a_variable_that_the_template_does_not_take_is_refused_by_name_with_those_that_it_takes(
    folder: Path, name: str
) -> None:
    (folder / "chat_template.jinja").write_text(THINKING + "{{ bos_token }}")
    with pytest.raises(TemplateRefusal, match="it has: enable_thinking, style") as raised:
        ours(folder, CHATS[0], variables={name: True})
    assert raised.value.param == f"chat_template_kwargs.{name}"


def test_the_generation_prompt_can_be_left_out(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(THINKING)
    text = ours(folder, CHATS[2], add_generation_prompt=False)
    assert text == by_transformers(folder, CHATS[2], add_generation_prompt=False)
    assert text.endswith("</user>")


@pytest.mark.parametrize("source", [THINKING, TRIMMING])
@pytest.mark.parametrize("last", ["The answer is", "The answer is ", "  ", "", " x\n"])
def test_the_last_message_can_be_continued(folder: Path, source: str, last: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    messages = [*CHATS[0], {"role": "assistant", "content": last}]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours(folder, messages, **asked)
    assert text == by_transformers(folder, messages, **asked)
    assert text.rstrip().endswith(last.strip())
    assert messages[-1]["content"] == last


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[-1].content[:3] }}", "fixed words"])
def test_a_last_message_that_the_template_does_not_show_cannot_be_continued(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    messages = [*CHATS[0], {"role": "assistant", "content": "The answer"}]
    asked = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(TemplateRefusal, match="cannot be continued") as raised:
        ours(folder, messages, **asked)
    assert raised.value.param == "continue_final_message"
    with pytest.raises(ValueError):
        by_transformers(folder, messages, **asked)


def test_prompt_tokens_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(TINY).apply_chat_template(
        CHATS[1], add_generation_prompt=True, return_dict=False
    )
    assert TextCodec(TINY).encode(ours(TINY, CHATS[1]), add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("source", "raised"),
    [
        ("{{ raise_exception('roles must alternate') }}", TemplateError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ namespace(__class__=1) }}", SecurityError),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", SecurityError),
        ("{{ messages[0].content.__init__.__globals__ }}", SecurityError),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_stopped_as_in_transformers(
    folder: Path, source: str, raised: type[Exception]
) -> None:
    (folder / "chat_template.jinja").write_text(source)
    for render in (ours, by_transformers):
        with pytest.raises(raised):
            render(folder, CHATS[0])
