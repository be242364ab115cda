"""What the gateway and a template's process say to each other: one JSON line each, a setup, then calls and outcomes."""

from __future__ import annotations

from typing import Any

import msgspec


class TemplateSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the template and its bounds.

    Args:
        special_tokens: variables that the checkpoint's tokenizer names, `bos_token` and the like.
        cpu_s: CPU time of the compilation, and of each call.
        memory_bytes: address space beyond what the process has at its start.
        max_chars: of a rendered text.
    """

    source: str
    special_tokens: dict[str, str]
    cpu_s: float
    memory_bytes: int
    max_chars: int


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One chat.

    Args:
        messages: at least one.
        continue_final_message: the text ends with the last message's own, for the model to go on with.
        variables: `chat_template_kwargs`.
        reasoning_effort: one more variable, under the field's own name.
    """

    messages: list[dict[str, str]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    reasoning_effort: str | None = None


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The prompt's text; empty in the answer to the setup."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The template's own refusal, or a field that it cannot honour. In the answer to the setup: it is no template."""

    param: str
    message: str


class TooMuch(msgspec.Struct, frozen=True, tag="too_much"):
    """A bound was met; `what` completes the sentence "it needs more than"."""

    what: str


Outcome = Rendered | Refused | TooMuch

encode = msgspec.json.encode
decode_setup = msgspec.json.Decoder(TemplateSetup).decode
decode_chat = msgspec.json.Decoder(Chat).decode
decode_outcome = msgspec.json.Decoder(Outcome).decode
