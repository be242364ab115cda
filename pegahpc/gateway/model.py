"""The model as the gateway knows it: its name, its context, and how a prompt becomes tokens."""

from __future__ import annotations

import time
from pathlib import Path

from pegahpc.config import ModelConfig
from pegahpc.gateway.errors import context_overflow, missing_template, refused_field
from pegahpc.gateway.openai import Generation
from pegahpc.gateway.planned import Planned, Prompt, plan
from pegahpc.gateway.template_messages import Chat
from pegahpc.gateway.text_files import chat_template, eos_token_ids, warm_up
from pegahpc.gateway.tokenizer import TextCodec
from pegahpc.page_names import model_salt, page_names, root_name
from pegahpc.tokenizer_files import read_json


class ServedModel:
    """Read once at start; immutable and thread-safe after that. Close it.

    Raises:
        ConfigError: a tokenizer file is missing or damaged, or a chat template cannot be read.

    Args:
        page_tokens: tokens of a page of the engines' prefix caches; 0: they have none.
        names_pages: False where there is one rank: where pages are does not matter then.
        max_body_bytes: of a request; it bounds what rendering a chat may take.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        default_max_tokens: int,
        page_tokens: int,
        max_body_bytes: int,
        names_pages: bool = True,
    ) -> None:
        folder = Path(config.path)
        self.name = config.name
        self.max_model_len = config.max_model_len
        self.loaded_at = int(time.time())  # seconds since the epoch
        self._default_max_tokens = default_max_tokens
        self.codec = TextCodec(folder)
        self._eos_ids = eos_token_ids(folder, self.codec)
        self._vocab_size = read_json(folder / "config.json").get("vocab_size") or self.codec.vocab_size
        self._ids_without_token = frozenset(range(self._vocab_size)) - self.codec.token_ids
        self._templates = chat_template(folder, self.codec, max_body_bytes=max_body_bytes)
        self._page_tokens = page_tokens
        self._names_pages = names_pages
        self._root_name = root_name(model_salt(folder))

    def warm_up(self) -> None:
        """Start what the first chat would wait for.

        Raises:
            ConfigError: the chat template is none, or one that does not compile within its bounds.
        """
        if self._templates is not None:
            warm_up(self._templates)

    def close(self) -> None:
        """End what renders chats."""
        if self._templates is not None:
            self._templates.close()

    def plan(self, generation: Generation, request_id: str) -> list[Planned]:
        """The requests of all choices, prompt by prompt. Renders and tokenizes: call it off the event loop.

        Raises:
            ApiError: 400 for messages that the template refuses, for ids outside of the vocabulary, for an empty
                prompt, and for one that does not fit the context.
        """
        self._check_ids("stop_token_ids", generation.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in generation.sampling.logit_bias])
        prompts = [self._prompt(generation, idx) for idx in range(generation.num_prompts)]
        max_tokens = [self._max_tokens(generation, idx, len(prompt.tokens)) for idx, prompt in enumerate(prompts)]
        if generation.min_tokens > min(max_tokens):
            raise refused_field("min_tokens", f"{generation.min_tokens} is more than max_tokens, {min(max_tokens)}")
        stop = generation.stop_token_ids + (() if generation.ignore_eos else self._eos_ids)
        return plan(generation, prompts, request_id, max_tokens=max_tokens, stop=stop)

    def prefix_names(self, prompt_tokens: list[int]) -> list[bytes]:
        """Names of the prompt's pages that a cache may have: full ones, but not the one with the last token.

        That token is always computed, so a page that ends with it can never be hit.
        """
        return (
            page_names(prompt_tokens[:-1], self._page_tokens, self._root_name)
            if self._page_tokens and self._names_pages
            else []
        )

    def _prompt(self, generation: Generation, idx: int) -> Prompt:
        tokens = self._prompt_tokens(generation, idx)
        if not tokens:
            raise refused_field(generation.prompt_param(idx), "is empty: there is no token to start from")
        self._check_ids(generation.prompt_param(idx), tokens)
        echo = self._echo(generation, idx, tokens) if generation.is_echoed else ""
        is_shared = 0 < self._page_tokens < len(tokens)
        return Prompt(tokens, self.prefix_names(tokens), echo, is_shared)

    def _prompt_tokens(self, generation: Generation, idx: int) -> list[int]:
        if isinstance(generation.prompts, Chat):
            if self._templates is None:
                raise missing_template(self.name)
            return self.codec.encode(self._templates.render(generation.prompts), add_special_tokens=False)
        prompt = generation.prompts[idx]
        if isinstance(prompt, str):
            return self.codec.encode(prompt, add_special_tokens=True)
        return prompt

    def _echo(self, generation: Generation, idx: int, tokens: list[int]) -> str:
        """A text comes back as it was sent; token ids as they are shown, without special tokens."""
        assert not isinstance(generation.prompts, Chat)
        prompt = generation.prompts[idx]
        if isinstance(prompt, str):
            return prompt
        detokenizer = self.codec.detokenizer()
        return detokenizer.feed(tokens) + detokenizer.finish()

    def _check_ids(self, param: str, ids: list[int] | tuple[int, ...]) -> None:
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise refused_field(param, f"token id {highest} is outside of the vocabulary of {self._vocab_size}")
        if not self._ids_without_token.isdisjoint(ids):
            without = min(self._ids_without_token.intersection(ids))
            raise refused_field(param, f"token id {without} has no token in this model's tokenizer")

    def _max_tokens(self, generation: Generation, idx: int, num_prompt_tokens: int) -> int:
        left = self.max_model_len - num_prompt_tokens
        wanted = generation.max_tokens
        if left < (1 if wanted is None else wanted):
            raise context_overflow(
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=wanted,
                limit=self.max_model_len,
                param=generation.prompt_param(idx),
            )
        return min(self._default_max_tokens, left) if wanted is None else wanted
