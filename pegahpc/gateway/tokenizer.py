"""A checkpoint's tokenizer: text to ids, ids to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pegahpc.gateway.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_table,
    byte_token_ids,
    token_bytes,
)
from pegahpc.tokenizer_files import read_json, read_tokenizer
from pegahpc.vocabulary import token_ids


class TextCodec:
    """tokenizer.json with what tokenizer_config.json says of it. Thread-safe; `encode` lets other threads run.

    Raises:
        ConfigError: the folder has no tokenizer.json, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        files = read_tokenizer(folder)
        self._tokenizer = files.tokenizer
        self.config = files.config
        self.special_tokens = files.special_tokens
        self.token_ids = token_ids(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(idx for idx, token in added.items() if token.special)
        self._shown_ids = self.token_ids - self._special_ids
        bos_id = self.special_token_id("bos_token")
        self._bos_ids = [] if bos_id is None else [bos_id]
        self._puts_bos = bool(self._bos_ids) and self._tokenizer.encode("").ids[:1] == self._bos_ids
        self._needs_bos = not self._puts_bos and files.config.get("add_bos_token") is True
        self._choose_detokenizer(read_json(folder / "tokenizer.json").get("decoder") or {})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; with special tokens, what the tokenizer puts around a plain text (mostly a bos).

        A text that begins with the bos's own name gets no second one. A bos that only `add_bos_token` asks for
        (DeepSeek-V3's) is put as transformers 4 did when such models were made; 5 reads that key no more.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._puts_bos and ids[1:2] == self._bos_ids:
            return ids[1:]
        if add_special_tokens and self._needs_bos and ids[:1] != self._bos_ids:
            return self._bos_ids + ids
        return ids

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one request."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._tokenizer, shown_ids=self._shown_ids, byte_ids=self._byte_ids)

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
        return max(self.token_ids, default=-1) + 1

    def special_token_id(self, key: str) -> int | None:
        """The id of `bos_token`, `eos_token`, ...; None where the checkpoint has none."""
        text = self.special_tokens.get(key)
        return None if text is None else self._tokenizer.token_to_id(text)

    def _choose_detokenizer(self, decoder: dict[str, Any]) -> None:
        self._token_bytes: list[bytes] | None = None
        self._byte_ids: frozenset[int] = frozenset()
        steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            self._token_bytes = byte_table(self._tokenizer, self._special_ids)
        elif "ByteFallback" in kinds:
            self._byte_ids = byte_token_ids(self._tokenizer)
