"""tokenizer.json with the configs beside it, as transformers reads them: one reading for engines and gateway. No torch.

**Source** transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from pegahpc.config import ConfigError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a checkpoint says of its tokenizer.

    Args:
        config: tokenizer_config.json.
        special_tokens: `bos_token` and the like, the model's own names (`image_token`) included, as texts.
    """

    tokenizer: Tokenizer
    config: Mapping[str, Any]
    special_tokens: Mapping[str, str]


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer with all tokens that any of the files adds; it neither cuts nor pads.

    Raises:
        ConfigError: the folder has no tokenizer.json, or one of the files cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model.path: {folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"model.path: {path} is damaged: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older checkpoints
        config |= read_json(folder / "special_tokens_map.json")
    try:
        special_tokens = _add_tokens(tokenizer, config)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {folder}/tokenizer_config.json is damaged: {error!r}") from None
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    return TokenizerFiles(tokenizer, config, special_tokens)


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


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Add what the config declares and tokenizer.json does not have so; the named special tokens."""
    declared = {token.content: token for token in _declared(config)}
    named = {name: _as_token(given, declared) for name, given in _named(config).items()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [*named.values(), *(_as_token(given, declared) for given in extra if not isinstance(extra, dict))]

    present = tokenizer.get_added_tokens_decoder().values()
    missing = [token for token in declared.values() if repr(token) not in map(repr, present)]
    known = {token.content for token in [*present, *missing]}
    for token in special:
        if token.content not in known:
            known.add(token.content)
            missing.append(token)
    names = {token.content for token in named.values()}
    for token in missing:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(missing)
    return {name: token.content for name, token in named.items()}


def _declared(config: Mapping[str, Any]) -> list[AddedToken]:
    by_id = config.get("added_tokens_decoder") or {}
    return [_from_fields(by_id[idx], special=False) for idx in sorted(by_id, key=int)]


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """The standard names, then those that only this model has."""
    named = {name: config[name] for name in NAMED if config.get(name) is not None}
    own = {name: text for name, text in config.items() if name.endswith("_token") and isinstance(text, str)}
    extra = config.get("extra_special_tokens")
    return (
        named
        | {name: text for name, text in own.items() if name not in named}
        | (extra if isinstance(extra, dict) else {})
    )


def _as_token(given: str | Mapping[str, Any], declared: Mapping[str, AddedToken]) -> AddedToken:
    text = given if isinstance(given, str) else given["content"]
    if text in declared:
        return declared[text]
    return AddedToken(text, special=True) if isinstance(given, str) else _from_fields(given, special=True)


def _from_fields(fields: Mapping[str, Any], *, special: bool) -> AddedToken:
    flags = {name: fields[name] for name in FLAGS if name in fields}
    return AddedToken(fields["content"], **({"special": special} | flags))
