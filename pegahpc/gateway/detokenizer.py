"""Tokens to text while they come: any chunking gives the text of one whole decode, byte for byte.

A character is shown when it is complete; special tokens are skipped, as in `decode(skip_special_tokens=True)`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """One request's text, fed step by step."""

    @property
    def is_mid_character(self) -> bool:
        """Whether the last token left a character incomplete."""
        ...

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def finish(self) -> str:
        """No more tokens come: what is still incomplete, as a whole decode shows it (U+FFFD)."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies (DeepSeek, Qwen, GLM, GPT): a table and the UTF-8 decoder of Python.

    Args:
        token_bytes: token id -> its bytes; empty for special tokens and holes.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode

    @property
    def is_mid_character(self) -> bool:
        """Whether bytes wait for the rest of their character."""
        return bool(self._decoder.getstate()[0])

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; ids outside of the vocabulary show nothing."""
        table, num_tokens = self._bytes, len(self._bytes)
        return self._decode(b"".join([table[token] for token in tokens if token < num_tokens]))

    def finish(self) -> str:
        """The incomplete rest."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For other decoders (sentencepiece style): decodes from the last shown token on.

    A run of byte tokens (`<0xE2>`) is decoded when it ends, because one bad byte in it spoils the whole run.

    Args:
        shown_ids: those that have a token which is no special one; all others are as if they were not there.
    """

    def __init__(self, tokenizer: Tokenizer, *, shown_ids: frozenset[int], byte_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._shown = ""  # the window's text that the client has

    @property
    def is_mid_character(self) -> bool:
        """Whether a run of byte tokens goes on."""
        return bool(self._window) and self._window[-1] in self._byte_ids

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window += [token for token in tokens if token in self._shown_ids]
        if not self._window or self._window[-1] in self._byte_ids:
            return ""
        return self._show()

    def finish(self) -> str:
        """The incomplete rest."""
        return self._show() if self._window else ""

    def _show(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        new = text[len(self._shown) :]
        self._window = self._window[-1:]
        self._shown = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return new


def byte_table(tokenizer: Tokenizer, special_ids: frozenset[int]) -> list[bytes]:
    """Token id -> bytes for a ByteLevel decoder.

    **Source** GPT-2's `bytes_to_unicode`; a token with a character outside of that alphabet (an added token) stands
    for its own UTF-8, as in tokenizers' `ByteLevel::decode_chain`.
    """
    alphabet = {char: byte for byte, char in _byte_characters().items()}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, idx in vocab.items():
        if idx not in special_ids:
            is_bytes = all(char in alphabet for char in token)
            table[idx] = bytes(alphabet[char] for char in token) if is_bytes else token.encode()
    return table


def token_bytes(tokenizer: Tokenizer, token: int, byte_ids: frozenset[int]) -> bytes | None:
    """What a token of another decoder stands for: its byte, or its text with spaces for sentencepiece's marks."""
    piece = tokenizer.id_to_token(token)
    if piece is None:
        return None
    return bytes([int(piece[3:5], 16)]) if token in byte_ids else piece.replace("\u2581", " ").encode()


def byte_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of `<0x00>` to `<0xFF>`."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    return frozenset(idx for token, idx in vocab.items() if BYTE_TOKEN.fullmatch(token))


def _byte_characters() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + idx) for idx, byte in enumerate(others)}
