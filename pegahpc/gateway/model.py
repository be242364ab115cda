"""The model as the gateway knows it: its name, its context, and how a prompt becomes tokens."""

from __future__ import annotations

import time
from pathlib import Path

from pegahpc.config import ModelConfig
from pegahpc.gateway.errors import context_overflow, refused_field
from pegahpc.gateway.openai import Chat, Generation
from pegahpc.gateway.templates import missing_template
from pegahpc.gateway.tokenizer import TextCodec, chat_template, eos_token_ids, read_json
from pegahpc.page_names import model_salt, page_names, root_name
from pegahpc.wire.messages import Request


class ServedModel:
    """Read once at start; immutable and thread-safe after that.

    Raises:
        ConfigError: a tokenizer file or the chat template is missing or damaged.

    Args:
        page_tokens: tokens of a page of the engines' caches.
    """

    def __init__(self, config: ModelConfig, *, default_max_tokens: int, page_tokens: int) -> None:
        folder = Path(config.path)
        self.name = config.name
        self.max_model_len = config.max_model_len
        self.loaded_at = int(time.time())  # seconds since the epoch
        self._default_max_tokens = default_max_tokens
        self.codec = TextCodec(folder)
        self._eos_ids = eos_token_ids(folder, self.codec)
        self._vocab_size = read_json(folder / "config.json").get("vocab_size") or self.codec.vocab_size
        self._template = chat_template(folder, self.codec)
        self._page_tokens = page_tokens
        self._root_name = root_name(model_salt(folder))

    def to_request(self, generation: Generation, request_id: str) -> Request:
        """What goes over the wire. Renders and tokenizes: call it off the event loop.

        Raises:
            ApiError: 400 for messages that the template refuses, for ids outside of the vocabulary, for an empty
                prompt, and for one that does not fit the context.
        """
        tokens = self._prompt_tokens(generation)
        stop_ids = generation.stop_token_ids + (() if generation.ignore_eos else self._eos_ids)
        self._check_ids("stop_token_ids", generation.stop_token_ids)
        return Request(
            id=request_id,
            prompt_tokens=tokens,
            max_tokens=self._max_tokens(generation, len(tokens)),
            sampling=generation.sampling,
            stop_token_ids=tuple(sorted(set(stop_ids))),
        )

    def prefix_names(self, prompt_tokens: list[int]) -> list[bytes]:
        """Names of the prompt's pages that a cache may have: full ones, but not the one with the last token.

        That token is always computed, so a page that ends with it can never be hit.
        """
        return page_names(prompt_tokens[:-1], self._page_tokens, self._root_name)

    def _prompt_tokens(self, generation: Generation) -> list[int]:
        prompt = generation.prompt
        if isinstance(prompt, str):
            tokens = self.codec.encode(prompt, add_special_tokens=True)
        elif isinstance(prompt, Chat):
            if self._template is None:
                raise missing_template(self.name)
            tokens = self.codec.encode(self._template.render(prompt.messages), add_special_tokens=False)
        else:
            self._check_ids("prompt", prompt)
            tokens = prompt
        if not tokens:
            raise refused_field(generation.prompt_param, "is empty: there is no token to start from")
        return tokens

    def _check_ids(self, param: str, ids: list[int] | tuple[int, ...]) -> None:
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise refused_field(param, f"token id {highest} is outside of the vocabulary of {self._vocab_size}")

    def _max_tokens(self, generation: Generation, num_prompt_tokens: int) -> int:
        left = self.max_model_len - num_prompt_tokens
        if left < (generation.max_tokens or 1):
            raise context_overflow(
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=generation.max_tokens,
                limit=self.max_model_len,
                param=generation.prompt_param,
            )
        return generation.max_tokens or min(self._default_max_tokens, left)
