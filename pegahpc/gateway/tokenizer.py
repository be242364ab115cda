"""A checkpoint's tokenizer: text to ids, ids to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pegahpc.config import ConfigError
from pegahpc.gateway.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_table,
    byte_token_ids,
    token_bytes,
)
from pegahpc.vocabulary import token_ids

SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TextCodec:
    """tokenizer.json with what tokenizer_config.json says of it. Thread-safe; `encode` lets other threads run.

    Raises:
        ConfigError: the folder has no tokenizer.json, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model.path: {folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"model.path: {path} is damaged: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = read_json(folder / "tokenizer_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(idx for idx, token in added.items() if token.special)
        self._bos_ids = self._extra_bos_ids()
        self._choose_detokenizer(read_json(path).get("decoder") or {})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; with special tokens, what the tokenizer puts around a plain text (mostly a bos)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self._bos_ids + ids if add_special_tokens else ids

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one request."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._tokenizer, special_ids=self._special_ids, byte_ids=self._byte_ids)

    def token_bytes(self, token: int) -> bytes | None:
        """What one token stands for, as UTF-8, and maybe a piece of a character; a special token for its name.

        None for an id that stands for nothing.
        """
        if self._token_bytes is None or token in self._special_ids:
            return token_bytes(self._tokenizer, token, self._byte_ids)
        return (self._token_bytes[token] if token < len(self._token_bytes) else b"") or None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(token_ids(self._tokenizer), default=-1) + 1

    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and the like, as a chat template sees them."""
        named = {key: self.config.get(key) for key in SPECIAL_TOKEN_KEYS}
        texts = {key: token.get("content") if isinstance(token, dict) else token for key, token in named.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def special_token_id(self, key: str) -> int | None:
        """The id of `bos_token`, `eos_token`, ...; None where the checkpoint has none."""
        text = self.special_tokens().get(key)
        return None if text is None else self._tokenizer.token_to_id(text)

    def _extra_bos_ids(self) -> list[int]:
        """A bos that `add_bos_token` asks for and tokenizer.json does not put itself (DeepSeek-V3's does not)."""
        bos = self.special_token_id("bos_token")
        if self.config.get("add_bos_token") is not True or bos is None:
            return []
        return [] if self._tokenizer.encode("").ids[:1] == [bos] else [bos]

    def _choose_detokenizer(self, decoder: dict[str, Any]) -> None:
        self._token_bytes: list[bytes] | None = None
        self._byte_ids: frozenset[int] = frozenset()
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            self._token_bytes = byte_table(self._tokenizer, self._special_ids)
        elif "ByteFallback" in kinds:
            self._byte_ids = byte_token_ids(self._tokenizer)


def read_json(path: Path) -> dict[str, Any]:
    """The document, or {} where there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: {path} is damaged: {error}") from None
    except OSError as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error.strerror}") from None
