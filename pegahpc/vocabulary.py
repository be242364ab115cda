"""Which ids of a model's vocabulary may be drawn: one reading of the checkpoint, for engines and gateway. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from pegahpc.config import ConfigError
from pegahpc.tokenizer_files import read_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The ids 0 to size - 1, as wide as the model's head.

    Args:
        suppressed: never drawn, ascending: ids without a token, and generation_config.json's `suppress_tokens`.
        begin_suppressed: not drawn as an answer's first token, its `begin_suppress_tokens`; none of `suppressed`.
    """

    size: int
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()

    def leaves_any(self, without: Iterable[int] = ()) -> bool:
        """Whether an answer can always begin, and go on, when `without` is not drawn either."""
        gone = {*self.suppressed, *self.begin_suppressed, *(idx for idx in without if 0 <= idx < self.size)}
        return len(gone) < self.size


class _GenerationConfig(msgspec.Struct):
    """What generation_config.json says of ids that are not to be drawn."""

    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None


def token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that has a token, added ones included."""
    return frozenset(tokenizer.get_vocab(with_added_tokens=True).values())


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """What a checkpoint's tokenizer.json and generation_config.json leave of `size` ids; without the files, all.

    Raises:
        ConfigError: a file cannot be read, or nothing is left to draw.
    """
    named = _suppressed_by_name(folder)
    suppressed = {*_without_token(folder, size), *(named.suppress_tokens or ())} & {*range(size)}
    begin = {*(named.begin_suppress_tokens or ())} & {*range(size)} - suppressed
    vocabulary = Vocabulary(size, tuple(sorted(suppressed)), tuple(sorted(begin)))
    if not vocabulary.leaves_any():
        raise ConfigError(f"model.path: {folder}: no token is left to draw of {size} (tokenizer, suppressed tokens)")
    return vocabulary


def _without_token(folder: Path, size: int) -> frozenset[int]:
    """Padding above the tokenizer's highest id, and holes below."""
    if not (folder / "tokenizer.json").is_file():
        return frozenset()
    return frozenset(range(size)) - token_ids(read_tokenizer(folder).tokenizer)


def _suppressed_by_name(folder: Path) -> _GenerationConfig:
    path = folder / "generation_config.json"
    if not path.is_file():
        return _GenerationConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from None
