"""What the OpenAI API may ask: from a body to a typed `Generation`, or a refusal that names the field.

`fields` has the range of each field by itself; here are the rules between them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pegahpc.gateway.body import read_fields
from pegahpc.gateway.errors import refused_field
from pegahpc.gateway.fields import (
    MAX_CHOICES,
    ChatFields,
    CommonFields,
    CompletionFields,
    StreamOptions,
    TokenId,
)
from pegahpc.gateway.template_messages import Chat
from pegahpc.wire.messages import Sampling

MASK_64 = (1 << 64) - 1


Prompts = Chat | list[str] | list[list[int]]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for, checked; the same for both endpoints.

    Args:
        num_choices: answers to each prompt.
        num_candidates: sequences made of each prompt; if more than `num_choices`, the most probable are the answers.
        max_tokens: None where the client left it out.
        sampling: all but the seed, which each choice has its own of.
        seed: None where the client left it out.
        includes_stop: the stop string or stop token is shown.
        logprobs: alternatives to show with each token; None shows no logprobs.
        prompt_logprobs: the same for the prompt's tokens, in a document of their own.
        is_echoed: the prompt stands before its answer, with logprobs where the answer has them.
    """

    prompts: Prompts
    num_choices: int
    num_candidates: int
    max_tokens: int | None
    min_tokens: int
    sampling: Sampling
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    includes_stop: bool
    logprobs: int | None
    prompt_logprobs: int | None
    is_echoed: bool
    is_streamed: bool
    include_usage: bool
    counts_in_events: bool

    @property
    def num_prompts(self) -> int:
        """A chat is one prompt."""
        return 1 if isinstance(self.prompts, Chat) else len(self.prompts)

    @property
    def num_sequences(self) -> int:
        """How many sequences the engines make for it."""
        return self.num_prompts * self.num_candidates

    @property
    def tells_prompts(self) -> bool:
        """Whether each token of the prompts has its logprobs in the answer, which may be long work to write."""
        return self.prompt_logprobs is not None or (self.is_echoed and self.logprobs is not None)

    def prompt_param(self, idx: int) -> str:
        """The API's name of the field that has this prompt."""
        if isinstance(self.prompts, Chat):
            return "messages"
        return "prompt" if self.num_prompts == 1 else f"prompt[{idx}]"


def parse_chat(body: bytes, model: str) -> Generation:
    """Check a body of /v1/chat/completions.

    Raises:
        ApiError: 400 naming the field, or 404 for a model that is not `model`.
    """
    fields = read_fields(body, ChatFields, model)
    if fields.top_logprobs and not fields.logprobs:
        raise refused_field("top_logprobs", "is only allowed when logprobs is true")
    return _generation(
        fields,
        prompts=_chat(fields),
        num_candidates=fields.n,
        logprobs=fields.top_logprobs if fields.logprobs else None,
        is_echoed=False,
    )


def parse_completion(body: bytes, model: str) -> Generation:
    """Check a body of /v1/completions.

    Raises:
        ApiError: 400 naming the field, or 404 for a model that is not `model`.
    """
    fields = read_fields(body, CompletionFields, model)
    if fields.max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
        raise refused_field("max_tokens", "0 asks for nothing without echo or prompt_logprobs")
    return _generation(
        fields,
        prompts=_prompts(fields.prompt),
        num_candidates=_num_candidates(fields),
        logprobs=fields.logprobs,
        is_echoed=fields.echo,
    )


def _chat(fields: ChatFields) -> Chat:
    """Messages, and what else the chat template is told."""
    if fields.continue_final_message and fields.add_generation_prompt:
        raise refused_field("continue_final_message", "contradicts add_generation_prompt; send one of them")
    if fields.reasoning_effort is not None and "reasoning_effort" in fields.chat_template_kwargs:
        raise refused_field("reasoning_effort", "is in chat_template_kwargs too; send one of them")
    begins_answer = fields.add_generation_prompt
    return Chat(
        messages=[message.for_template() for message in fields.messages],
        add_generation_prompt=not fields.continue_final_message if begins_answer is None else begins_answer,
        continue_final_message=fields.continue_final_message,
        variables=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
    )


def _generation(
    fields: CommonFields,
    *,
    prompts: Prompts,
    num_candidates: int,
    logprobs: int | None,
    is_echoed: bool,
) -> Generation:
    options = fields.stream_options or StreamOptions()
    _check_stream(fields, options)
    generation = Generation(
        prompts=prompts,
        num_choices=fields.n,
        num_candidates=num_candidates,
        max_tokens=_max_tokens(fields),
        min_tokens=fields.min_tokens,
        sampling=_sampling(fields),
        seed=None if fields.seed is None else fields.seed & MASK_64,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        includes_stop=fields.include_stop_str_in_output,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        is_echoed=is_echoed,
        is_streamed=fields.stream,
        include_usage=options.include_usage,
        counts_in_events=options.continuous_usage_stats,
    )
    if generation.num_sequences > MAX_CHOICES:
        many = f"{generation.num_prompts} prompts of {num_candidates} choices each are more than {MAX_CHOICES} choices"
        raise refused_field("prompt", many)
    return generation


def _check_stream(fields: CommonFields, options: StreamOptions) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise refused_field("stream_options", "is only allowed when stream is true")
    if options.continuous_usage_stats and not options.include_usage:
        raise refused_field("stream_options.continuous_usage_stats", "is only allowed when include_usage is true")
    if fields.stream and fields.prompt_logprobs is not None:
        raise refused_field("prompt_logprobs", "cannot be streamed; echo with logprobs can")


def _num_candidates(fields: CompletionFields) -> int:
    if fields.best_of is None:
        return fields.n
    if fields.best_of < fields.n:
        raise refused_field("best_of", f"{fields.best_of} is less than n, which is {fields.n}")
    if fields.best_of > fields.n and fields.stream:
        raise refused_field("best_of", "cannot be streamed: which choices are best is known at their end")
    return fields.best_of


def _prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """The texts, or the token ids, of one or more prompts."""
    if isinstance(prompt, str):
        return [prompt]
    first = prompt[0] if prompt else None
    try:
        if isinstance(first, str):
            return msgspec.convert(prompt, list[str])
        nested = prompt if isinstance(first, list) else [prompt]
        return msgspec.convert(nested, list[Annotated[list[TokenId], Meta(min_length=1)]])
    except msgspec.ValidationError:
        message = "must be a text, a list of one or more token ids, or a list that has only texts or only such lists"
        raise refused_field("prompt", message) from None


def _max_tokens(fields: CommonFields) -> int | None:
    given = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(given) > 1:
        message = f"{fields.max_completion_tokens} contradicts max_tokens {fields.max_tokens}; send one of them"
        raise refused_field("max_completion_tokens", message)
    return next(iter(given), None)


def _sampling(fields: CommonFields) -> Sampling:
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(fields.top_k, 0),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=tuple(fields.logit_bias.items()),
    )
