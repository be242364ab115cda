"""Which tokens' logprobs may be shown: those whose text is, whatever is held back, cut off or half a character."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pegahpc.gateway.detokenizer import WindowDetokenizer, token_bytes
from pegahpc.gateway.stop_strings import StopStrings
from pegahpc.gateway.text import Shown, TokenText, echoed
from pegahpc.gateway.tokenizer import TextCodec
from pegahpc.wire.messages import TokenLogprob
from tests.gateway.conftest import TINY

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
CODEC = TextCodec(TINY)
BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
WORDS = ["a", "ab", "é", "世界", "👋🏽", "\n", " fox", "e\u0301", "क्षि", "Once upon", "🧿"]

texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.text(max_size=20)
seeds = st.integers(0, 2**32)


def told(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, [])


def bytes_of(token: int) -> bytes:
    """By the vocabulary's own spelling of bytes, which is GPT-2's."""
    piece = TOKENIZER.id_to_token(token)
    assert piece is not None
    return bytes(BYTE_OF[char] for char in piece)


def ends(tokens: Sequence[int]) -> list[int]:
    """Where each token ends in the text's UTF-8."""
    return [len(b"".join(map(bytes_of, tokens[: idx + 1]))) for idx in range(len(tokens))]


def cut(tokens: Sequence[int], seed: int) -> list[list[int]]:
    draw, pieces, rest = random.Random(seed), [], list(tokens)
    while rest:
        num_taken = draw.choice([0, 1, 1, 2, 5])
        pieces.append(rest[:num_taken])
        rest = rest[num_taken:]
    return pieces


def expected_cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first; the longest of those that end there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=150)
@given(texts, st.lists(st.sampled_from(WORDS), max_size=2), seeds)
def test_the_tokens_shown_are_exactly_those_that_end_within_the_text_shown(
    text: str, stops: list[str], seed: int
) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    of = TokenText(CODEC.detokenizer(), StopStrings(stops))
    said, shown = "", list[Shown]()
    for piece in cut(tokens, seed):
        said += of.feed(piece, [told(token) for token in piece])
        shown += of.take_shown()
        within = [end for end in ends(tokens) if end <= len(said.encode())]
        assert len(shown) == len(within)  # never a token of text that is held back
    said += of.finish()
    shown += of.take_shown()
    assert said == expected_cut(text, stops)
    within = [end for end in ends(tokens) if end <= len(said.encode())]
    assert [token.token for token in shown] == tokens[: len(within)]


@given(texts)
def test_a_token_begins_where_the_complete_characters_before_it_end(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    of = TokenText(CODEC.detokenizer(), StopStrings([]), num_echoed=7)
    of.feed(tokens, [told(token) for token in tokens])
    of.finish()
    begins = [0, *ends(tokens)[:-1]] if tokens else []
    complete = [len(text.encode()[:begin].decode("utf-8", "ignore")) for begin in begins]
    assert [token.offset for token in of.take_shown()] == [7 + num for num in complete]


def test_the_pieces_of_a_character_are_shown_with_it_and_not_before() -> None:
    tokens = TOKENIZER.encode("🧿", add_special_tokens=False).ids
    assert len(tokens) > 1
    of = TokenText(CODEC.detokenizer(), StopStrings([]))
    for token in tokens[:-1]:
        assert (of.feed([token], [told(token)]), of.take_shown()) == ("", [])
    assert of.feed(tokens[-1:], [told(tokens[-1])]) == "🧿"
    assert [token.token for token in of.take_shown()] == tokens


def test_the_pieces_of_a_character_that_never_ends_are_shown_with_its_replacement() -> None:
    tokens = TOKENIZER.encode("ab🧿", add_special_tokens=False).ids[:-1]
    of = TokenText(CODEC.detokenizer(), StopStrings([]))
    text = of.feed(tokens, [told(token) for token in tokens]) + of.finish()
    assert text == "ab\ufffd"
    assert [token.token for token in of.take_shown()] == tokens


def test_special_tokens_have_no_text_and_are_shown_with_what_stands_before_them() -> None:
    (word,) = TOKENIZER.encode("fox", add_special_tokens=False).ids[:1]
    of = TokenText(CODEC.detokenizer(), StopStrings([]))
    assert of.feed([2, word, 2], [told(2), told(word), told(2)]) != ""
    shown = of.take_shown()
    assert [token.token for token in shown] == [2, word, 2]
    assert shown[0].offset == shown[1].offset == 0 < shown[2].offset


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5])
def test_stop_strings_are_looked_for_after_the_first_tokens_only(num_tokens: int) -> None:
    tokens = TOKENIZER.encode("1212121", add_special_tokens=False).ids  # one digit a token
    assert len(tokens) == 7
    of = TokenText(CODEC.detokenizer(), StopStrings(["2"]), first_unstoppable=num_tokens, has_logprobs=False)
    text = "".join(of.feed(piece, []) for piece in cut(tokens, num_tokens)) + of.finish()
    assert text == {0: "1", 1: "1", 3: "121", 5: "12121"}[num_tokens]
    assert of.has_stopped and of.take_shown() == []


def test_an_echoed_prompt_has_null_first_and_offsets_within_it() -> None:
    tokens = [1, *TOKENIZER.encode("a 世 b", add_special_tokens=False).ids]
    shown = echoed(CODEC.detokenizer(), "a 世 b", tokens, [told(token) for token in tokens[1:]])
    assert [token.token for token in shown] == tokens
    assert shown[0].logprob is None and None not in [token.logprob for token in shown[1:]]
    assert shown[0].offset == shown[1].offset == 0
    assert [token.offset for token in shown] == sorted(token.offset for token in shown)
    assert max(token.offset for token in shown) < len("a 世 b")


def test_a_prompt_that_reads_otherwise_than_its_tokens_has_no_offset_beyond_its_end() -> None:
    tokens = TOKENIZER.encode("abcdef", add_special_tokens=False).ids
    assert max(token.offset for token in echoed(CODEC.detokenizer(), "ab", tokens, [])) <= 2


def test_each_token_of_the_shipped_model_stands_for_the_bytes_of_its_spelling() -> None:
    special = {"<|pad|>": 0, "<|bos|>": 1, "<|end|>": 2}
    for name, token in special.items():
        assert CODEC.token_bytes(token) == name.encode()
    for token in range(6, TOKENIZER.get_vocab_size()):
        assert CODEC.token_bytes(token) == bytes_of(token)
    assert CODEC.token_bytes(TOKENIZER.get_vocab_size()) is None
    assert CODEC.token_bytes(10**9) is None


def sentencepiece() -> Tokenizer:
    """A vocabulary in the manner of Llama: words with a mark for the space before them, and bytes."""
    pieces = ["<unk>", "▁a", "▁fox", "es", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({piece: idx for idx, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def test_tokens_of_a_sentencepiece_vocabulary_stand_for_spaced_words_and_bytes() -> None:
    tokenizer = sentencepiece()
    byte_ids = frozenset(range(4, 260))
    expected = {1: b" a", 2: b" fox", 3: b"es", 4 + 0xE4: b"\xe4", 260: b"</s>"}
    assert {token: token_bytes(tokenizer, token, byte_ids) for token in expected} == expected
    assert token_bytes(tokenizer, 261, byte_ids) is None


def test_bytes_of_a_sentencepiece_vocabulary_are_shown_with_their_character() -> None:
    tokens = [1, *(4 + byte for byte in "世".encode()), 3]
    detokenizer = WindowDetokenizer(sentencepiece(), shown_ids=frozenset(range(260)), byte_ids=frozenset(range(4, 260)))
    of = TokenText(detokenizer, StopStrings(["世"]))
    text = "".join(of.feed([token], [told(token)]) for token in tokens) + of.finish()
    assert text == "a"
    assert [token.token for token in of.take_shown()] == [1]
