"""Fields that this fleet does not honour: accepted while they ask for nothing, else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegahpc.gateway.errors import refused_field

# Field -> the values that ask for nothing. 0 and False are told apart.
NO_OPS: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "cache_salt": (None,),
    "chat_template": (None,),
    "detokenize": (None, True),
    "documents": (None, []),
    "early_stopping": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "length_penalty": (None, 1),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),  # says nothing without tools
    "prediction": (None,),
    "priority": (None, 0),
    "prompt_cache_key": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": (None, False),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "suffix": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}
CHAT_NO_OPS = NO_OPS | {"best_of": (None, 1), "echo": (None, False)}
COMPLETION_NO_OPS = NO_OPS | {
    "add_generation_prompt": (None, True),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "reasoning_effort": (None,),
    "top_logprobs": (None, 0),
}
STREAM_NO_OPS: Mapping[str, tuple[object, ...]] = {
    "include_obfuscation": (None, False),
}
MESSAGE_NO_OPS: Mapping[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "reasoning_content": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}


def without_no_ops(fields: dict[str, Any], no_ops: Mapping[str, tuple[object, ...]], *, where: str) -> dict[str, Any]:
    """The other fields. `where` is the path that a refusal puts before the name.

    Raises:
        ApiError: 400 for a field of the table at a value that asks for something.
    """
    kept = {}
    for name, value in fields.items():
        if name not in no_ops:
            kept[name] = value
        elif not any(value == no_op and isinstance(value, bool) == isinstance(no_op, bool) for no_op in no_ops[name]):
            raise refused_field(where + name, "this value is not supported by this fleet; leave the field out")
    return kept
