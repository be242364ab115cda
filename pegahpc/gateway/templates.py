"""Chat templates, rendered as transformers renders them, in a sandbox that cannot change what it is given.

The sandbox keeps a template from reaching out; it bounds neither its time nor its memory. So this module is used in a
process of its own (`template_worker`), whose bounds the kernel holds. Compiling counts: jinja2 folds constants then.

**Source** transformers 5.24, `utils/chat_template_utils.py` (`_cached_compile_jinja_template`,
`render_jinja_template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pegahpc.gateway.template_messages import Chat

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # its trailing space tells whether the template trims
OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


class TemplateRefusal(Exception):
    """What is asked cannot be rendered; `param` is the field of the request that is at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ChatTemplate:
    """A model's template. Messages in, prompt text out.

    Args:
        special_tokens: `bos_token` and the like, as the tokenizer's config names them.

    Raises:
        jinja2.TemplateSyntaxError: the checkpoint's template is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._reads_content = "content" in source
        self._special_tokens = dict(special_tokens)
        self._variables = meta.find_undeclared_variables(environment.parse(source)) - {*OWN_NAMES, *special_tokens}

    def render(self, chat: Chat) -> str:
        """The prompt; it ends where the assistant's answer begins, or goes on.

        Raises:
            TemplateRefusal: a variable that the template does not read, or a last message that it does not show.
            Exception: whatever the template raises.
        """
        variables = self._asked_for(chat)
        messages = _with_tag(chat.messages) if chat.continue_final_message else chat.messages
        text = self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=chat.add_generation_prompt,
            **self._special_tokens,
            **variables,
        )
        return self._cut_at_tag(text, chat.messages[-1]["content"]) if chat.continue_final_message else text

    def _asked_for(self, chat: Chat) -> dict[str, Any]:
        """The variables. One that says nothing to the template would be ignored, and nothing is ignored."""
        fields = {name: f"chat_template_kwargs.{name}" for name in chat.variables}
        variables = dict(chat.variables)
        if chat.reasoning_effort is not None:
            fields["reasoning_effort"] = "reasoning_effort"
            variables["reasoning_effort"] = chat.reasoning_effort
        for name, field in fields.items():
            if name not in self._variables:
                known = ", ".join(sorted(self._variables)) or "none"
                message = f"the model's chat template has no such variable; it has: {known}"
                raise TemplateRefusal(field, message)
        return variables

    def _cut_at_tag(self, text: str, last: str) -> str:
        tag = CONTINUE_TAG.rstrip()
        if not self._reads_content or tag not in text or last.strip() not in text:
            message = "the model's chat template does not show the last message as it is: it cannot be continued"
            raise TemplateRefusal("continue_final_message", message)
        at = text.rindex(tag)
        return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it says nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body, as if the tag were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainNamespace(Namespace):
    """`namespace()`, without attributes that lead into Python's own."""

    def __init__(*args: Any, **attributes: Any) -> None:  # positional: a template may name an attribute "self"
        Namespace.__init__(*args, **attributes)
        for name in dict(*args[1:], **attributes):
            _refuse_underscore(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """`{% set ns.name = value %}`."""
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = PlainNamespace
    return environment


def _with_tag(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"] + CONTINUE_TAG}]


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
