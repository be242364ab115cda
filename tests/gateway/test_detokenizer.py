"""Streaming gives the text of one whole decode by the tokenizers library, however the tokens are cut."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pegahpc.gateway.detokenizer import Detokenizer
from pegahpc.gateway.text_files import eos_token_ids
from pegahpc.gateway.tokenizer import TextCodec
from tests.gateway.conftest import TINY

TINY_TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
TINY_CODEC = TextCodec(TINY)
VOCAB_SIZE = TINY_TOKENIZER.get_vocab_size()
TEXTS = [
    "👩‍👩‍👧‍👦 ok 👋🏽",
    "日本語の文章、你好世界",
    "e\u0301a\u0308 क्षि ไทย",
    "\U0001f600" * 5,
    "a\x00b\tc\n\n  d",
    "ﷺ\u200f\ufeff",
    "�x�",
]

tokens_lists = st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=40)
seeds = st.integers(0, 2**32)


def cut(tokens: Sequence[int], seed: int) -> list[list[int]]:
    """The tokens in random pieces, empty ones among them."""
    draw, pieces, rest = random.Random(seed), [], list(tokens)
    while rest:
        num_taken = draw.choice([0, 1, 1, 1, 2, 5])
        pieces.append(rest[:num_taken])
        rest = rest[num_taken:]
    return pieces


def stream(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join(map(detokenizer.feed, pieces)) + detokenizer.finish()


@given(tokens_lists, seeds)
def test_any_tokens_in_any_pieces_give_the_whole_decode(tokens: list[int], seed: int) -> None:
    whole = TINY_TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert stream(TINY_CODEC.detokenizer(), cut(tokens, seed)) == whole


@given(st.text(max_size=60) | st.sampled_from(TEXTS), seeds)
def test_a_text_comes_back_and_no_character_is_shown_in_halves(text: str, seed: int) -> None:
    pieces = cut(TINY_TOKENIZER.encode(text, add_special_tokens=False).ids, seed)
    detokenizer = TINY_CODEC.detokenizer()
    shown = [detokenizer.feed(piece) for piece in pieces]
    assert "".join(shown) == TINY_TOKENIZER.decode([token for piece in pieces for token in piece])
    assert detokenizer.finish() == ""
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown)


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    tokens = TINY_TOKENIZER.encode("\U0001f9ff", add_special_tokens=False).ids
    assert len(tokens) > 1
    detokenizer = TINY_CODEC.detokenizer()
    assert detokenizer.feed(tokens[:-1]) == ""
    assert detokenizer.finish() == TINY_TOKENIZER.decode(tokens[:-1])


def byte_level_with_added_tokens(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("思 考", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def sentencepiece_like(folder: Path) -> Tokenizer:
    """Gemma's and Llama's kind: "▁" for a space, byte tokens for what the vocabulary lacks, one space stripped."""
    words = ["<s>", "▁", "▁a", "b", "▁▁", "世", ",", "x▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: idx for idx, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("make", [byte_level_with_added_tokens, sentencepiece_like])
def test_other_vocabularies_give_the_whole_decode_too(make: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    codec = TextCodec(tmp_path)
    highest = tokenizer.get_vocab_size() - 1
    lowest = 0 if make is sentencepiece_like else VOCAB_SIZE - 200
    some = st.lists(st.integers(lowest, highest) | st.integers(lowest, lowest + 8), max_size=30)

    @settings(max_examples=300)
    @given(some, seeds)
    def check(tokens: list[int], seed: int) -> None:
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert stream(codec.detokenizer(), cut(tokens, seed)) == whole

    check()


def test_eos_ids_are_a_number_or_a_list_and_the_tokenizers_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    assert eos_token_ids(tmp_path, TextCodec(tmp_path)) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids(tmp_path, TextCodec(tmp_path)) == (9,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert eos_token_ids(tmp_path, TextCodec(tmp_path)) == (2, 7, 8)
