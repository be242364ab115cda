"""Which ids are never drawn: what a checkpoint's files say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from pegahpc.config import ConfigError
from pegahpc.vocabulary import Vocabulary, read_vocabulary, token_ids

SHIPPED = Path(__file__).parents[1] / "assets" / "tiny-moe"


def save(folder: Path, ids: list[int], added: int = 0, **generation_config: Any) -> Path:
    """A tokenizer with these ids and some added tokens after them."""
    tokenizer = Tokenizer(WordLevel({f"w{idx}": idx for idx in ids}, unk_token=f"w{ids[0]}"))
    tokenizer.add_special_tokens([AddedToken(f"<{number}>", special=True) for number in range(added)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if generation_config:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def test_ids_above_the_tokenizers_highest_are_padding(tmp_path: Path) -> None:
    assert read_vocabulary(save(tmp_path, list(range(6))), 10) == Vocabulary(10, suppressed=(6, 7, 8, 9))


def test_ids_without_a_token_are_holes(tmp_path: Path) -> None:
    assert read_vocabulary(save(tmp_path, [0, 1, 3, 7]), 9) == Vocabulary(9, suppressed=(2, 4, 5, 6, 8))


def test_added_tokens_are_tokens(tmp_path: Path) -> None:
    folder = save(tmp_path, [0, 1, 2], added=2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert token_ids(tokenizer) == {0, 1, 2, 3, 4}
    assert read_vocabulary(folder, 6).suppressed == (5,)


def test_a_tokenizer_larger_than_the_model_suppresses_nothing(tmp_path: Path) -> None:
    assert read_vocabulary(save(tmp_path, list(range(20))), 10) == Vocabulary(10)


def test_what_the_generation_config_suppresses_is_added(tmp_path: Path) -> None:
    folder = save(tmp_path, list(range(6)), suppress_tokens=[4, 1, 1, 99, -1], begin_suppress_tokens=[2, 4, 0, 77])
    assert read_vocabulary(folder, 8) == Vocabulary(8, suppressed=(1, 4, 6, 7), begin_suppressed=(0, 2))


@pytest.mark.parametrize("config", [{"suppress_tokens": None}, {"begin_suppress_tokens": []}, {"eos_token_id": [1]}])
def test_a_generation_config_may_say_nothing_of_it(tmp_path: Path, config: dict[str, Any]) -> None:
    assert read_vocabulary(save(tmp_path, list(range(6)), **config), 6) == Vocabulary(6)


def test_without_files_every_id_can_be_drawn(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path, 5) == Vocabulary(5)


def test_the_shipped_model_suppresses_nothing() -> None:
    assert read_vocabulary(SHIPPED, 3072) == Vocabulary(3072)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (save(tmp_path, [0, 1]) / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"model.path: .*{name}"):
        read_vocabulary(tmp_path, 4)


@pytest.mark.parametrize("wrong", ["all", [1, "2"], {"1": 2}])
def test_suppressed_tokens_that_are_no_ids_are_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read: .*suppress_tokens"):
        read_vocabulary(save(tmp_path, [0, 1], suppress_tokens=wrong), 2)


def test_a_checkpoint_that_leaves_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, [0, 1, 2], suppress_tokens=[0, 1], begin_suppress_tokens=[2])
    with pytest.raises(ConfigError, match="no token is left to draw of 5"):
        read_vocabulary(folder, 5)


def test_what_is_left_to_draw_counts_each_id_once() -> None:
    vocabulary = Vocabulary(6, suppressed=(4, 5), begin_suppressed=(0,))
    assert vocabulary.leaves_any() and vocabulary.leaves_any(without=[0, 1, 4, 2, 2, 6, -3])
    assert not vocabulary.leaves_any(without=[3, 2, 1])
