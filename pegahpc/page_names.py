"""Names of cache pages: a chain of content hashes over full pages. Engines and the gateway share this one function.

H_0 = blake2b-128(salt); H_i = blake2b-128(H_{i-1} + the page's token ids as little-endian u32).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

NAME_BYTES = 16


def root_name(salt: bytes) -> bytes:
    """H_0, before the first page."""
    return blake2b(salt, digest_size=NAME_BYTES).digest()


def next_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of the page that holds `tokens` after the page (or root) named `parent`."""
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return blake2b(parent + words.tobytes(), digest_size=NAME_BYTES).digest()


def page_names(tokens: Sequence[int], page_tokens: int, root: bytes) -> list[bytes]:
    """Names of the full pages of a sequence, in order; a last page that is not full has none."""
    names: list[bytes] = []
    parent = root
    for first in range(0, len(tokens) - page_tokens + 1, page_tokens):
        parent = next_name(parent, tokens[first : first + page_tokens])
        names.append(parent)
    return names


def model_salt(folder: Path) -> bytes:
    """What tells one checkpoint's pages from another's: its config.json and the names and sizes of its weight files."""
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=NAME_BYTES)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size};".encode())
    return digest.digest()
