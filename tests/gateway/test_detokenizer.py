"""Streaming gives the text of one whole decode by the tokenizers library, however the tokens are cut."""

import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from pegahpc.gateway.detokenizer import Detokenizer
from pegahpc.gateway.tokenizer import TextCodec
from tests.gateway.conftest import TINY

TEXTS = [
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 ok \U0001f44b\U0001f3fd",  # joined, and coloured
    "\U0001f3f4\U000e0067\U000e0062\U000e0077\U000e006c\U000e0073\U000e007f\U0001f1e9\U0001f1ea",  # flags
    "1\ufe0f\u20e3\u2764\ufe0f\u200d\U0001f525",
    "日本語の文章、你好世界",
    "각한글 \u1100\u1161\u11a8",  # syllables, and one made of its parts
    "e\u0301a\u0308\u0323 क्षि ไทย z\u0351\u0363\u0358",
    "\u05e2\u05b4\u05d1 \u0627\u0644\u0639\u064e \u200f\ufeff",
    "a\x00b\tc\r\n\n  d\u2028",
    "\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff",  # where UTF-8 grows by a byte
    "\ufffdx\ufffd",
    " a b,  x",
]
BROKEN = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"a\xe4\xb8b",
    b"\xf0\x9f",
    b"\x80\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x82(\xf0",
]
WORDS = ["<s>", "▁", "▁a", "b", "▁▁", "世", ",", "x▁", *(f"<0x{byte:02X}>" for byte in range(256))]


@dataclass
class Vocabulary:
    """A tokenizer, ours on the same file, and the token of each lone byte."""

    tokenizer: Tokenizer
    codec: TextCodec
    byte_ids: list[int]

    def whole(self, tokens: Sequence[int]) -> str:
        """The oracle."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@functools.cache
def vocabulary(kind: str) -> Vocabulary:
    makers: dict[str, Callable[[], Tokenizer]] = {
        "byte level": lambda: Tokenizer.from_file(str(TINY / "tokenizer.json")),
        "byte level with added tokens": with_added_tokens,
        "llama's kind": lambda: sentencepiece_like(decoders.Strip(" ", 1, 0)),
        "gemma's kind": sentencepiece_like,
    }
    tokenizer = makers[kind]()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        codec = TextCodec(Path(folder))
    return Vocabulary(tokenizer, codec, byte_ids(tokenizer, is_byte_level="byte" in kind))


def with_added_tokens() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("思 考", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    return tokenizer


def sentencepiece_like(*last: decoders.Decoder) -> Tokenizer:
    """ "▁" for a space, byte tokens for what the vocabulary lacks; Llama's kind strips one space."""
    tokenizer = Tokenizer(models.BPE({word: idx for idx, word in enumerate(WORDS)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return tokenizer


def byte_ids(tokenizer: Tokenizer, *, is_byte_level: bool) -> list[int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()  # type: ignore[no-untyped-call]
    names = [characters[byte] if is_byte_level else f"<0x{byte:02X}>" for byte in range(256)]
    ids = [idx for name in names if (idx := tokenizer.token_to_id(name)) is not None]
    assert len(ids) == 256
    return ids


def stream(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join(map(detokenizer.feed, pieces)) + detokenizer.finish()


def cut(tokens: Sequence[int], seed: int) -> list[Sequence[int]]:
    """The tokens in random pieces, empty ones among them."""
    draw, rest = random.Random(seed), list(tokens)
    pieces: list[Sequence[int]] = []
    while rest:
        num_taken = draw.choice([0, 1, 1, 1, 2, 5])
        pieces.append(rest[:num_taken])
        rest = rest[num_taken:]
    return pieces


def cuts(tokens: Any) -> Iterator[list[Any]]:
    """Every way to cut tokens, or a text, into pieces."""
    for borders in itertools.product((False, True), repeat=max(len(tokens) - 1, 0)):
        at = [0, *(idx for idx, is_border in enumerate(borders, start=1) if is_border), len(tokens)]
        yield [tokens[start:end] for start, end in itertools.pairwise(at)]


seeds = st.integers(0, 2**32)
KINDS = ["byte level", "byte level with added tokens", "llama's kind", "gemma's kind"]
kinds = pytest.mark.parametrize("kind", KINDS)
texts = st.text(max_size=30) | st.sampled_from(TEXTS) | st.lists(st.sampled_from(TEXTS), max_size=3).map("".join)


@kinds
def test_any_tokens_in_any_pieces_give_the_whole_decode(kind: str) -> None:
    words = vocabulary(kind)
    size = words.codec.vocab_size
    any_id = (
        st.integers(0, size + 3) | st.integers(size - 8, size + 3) | st.integers(0, 8) | st.sampled_from(words.byte_ids)
    )

    @settings(max_examples=300)
    @given(st.lists(any_id, max_size=40), seeds)
    def check(tokens: list[int], seed: int) -> None:
        assert stream(words.codec.detokenizer(), cut(tokens, seed)) == words.whole(tokens)

    check()


@kinds
@pytest.mark.parametrize("text", TEXTS)
def test_every_way_to_cut_gives_the_whole_decode(kind: str, text: str) -> None:
    words = vocabulary(kind)
    tokens = words.encode(text)
    for first in range(0, max(len(tokens) - 8, 0) + 1, 4):  # also from the middle of a character
        part = tokens[first : first + 9]
        assert {stream(words.codec.detokenizer(), pieces) for pieces in cuts(part)} == {words.whole(part)}


@kinds
@pytest.mark.parametrize("data", BROKEN)
def test_bytes_that_are_no_text_are_replacement_characters_as_in_the_whole_decode(kind: str, data: bytes) -> None:
    words = vocabulary(kind)
    around = words.encode("b")
    tokens = [*around, *(words.byte_ids[byte] for byte in data), *around]
    whole = words.whole(tokens)
    assert "\ufffd" in whole
    assert {stream(words.codec.detokenizer(), pieces) for pieces in cuts(tokens)} == {whole}
    if "byte" in kind:
        assert whole == (b"b" + data + b"b").decode("utf-8", "replace")


@kinds
def test_a_text_comes_back_and_what_was_shown_is_never_taken_back(kind: str) -> None:
    words = vocabulary(kind)

    @settings(max_examples=200)
    @given(texts, seeds)
    def check(text: str, seed: int) -> None:
        tokens = words.encode(text)
        whole = words.whole(tokens)
        detokenizer, shown = words.codec.detokenizer(), ""
        for piece in cut(tokens, seed):
            shown += detokenizer.feed(piece)
            assert whole.startswith(shown)
        assert shown + detokenizer.finish() == whole
        if "byte" in kind:
            assert shown == whole == text  # nothing waits when the text is complete

    check()


@given(texts)
@settings(max_examples=200)
def test_a_character_is_shown_with_the_token_that_completes_it(text: str) -> None:
    words = vocabulary("byte level")
    detokenizer, shown, data = words.codec.detokenizer(), "", b""
    for token in words.encode(text):
        shown += detokenizer.feed([token])
        data += words.codec.token_bytes(token) or b""
        complete = next(data[:end].decode() for end in range(len(data), -1, -1) if is_text(data[:end]))
        assert shown == complete
        assert detokenizer.is_mid_character == (len(complete.encode()) < len(data))


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@kinds
def test_an_incomplete_character_at_the_end_is_as_in_the_whole_decode(kind: str) -> None:
    words = vocabulary(kind)
    tokens = [words.byte_ids[byte] for byte in "\U0001f9ff".encode()]
    detokenizer = words.codec.detokenizer()
    assert detokenizer.feed(tokens[:-1]) == "" and detokenizer.is_mid_character
    assert detokenizer.finish() == words.whole(tokens[:-1])
    assert stream(words.codec.detokenizer(), [tokens]) == "\U0001f9ff"
