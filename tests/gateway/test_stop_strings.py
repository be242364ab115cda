"""Stop strings: the text up to the first match, whatever the pieces, and everything exactly once without one."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pegahpc.gateway.stop_strings import StopStrings
from pegahpc.gateway.text import PlainText, TokenText
from tests.gateway.conftest import Served
from tests.gateway.fake_engine import updates_for
from tests.gateway.test_detokenizer import KINDS, cut, cuts, seeds, vocabulary

letters = st.text("ab\n", max_size=30)
stops_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def by_definition(text: str, stops: Sequence[str], *, shows_match: bool = False) -> str:
    """Read letter by letter; at the first letter that completes a stop string, cut the longest one off, or show it."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - (0 if shows_match else max(map(len, done)))]
    return text


def pieces_of(text: str, borders: Sequence[int]) -> list[str]:
    at = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(at)]


@given(letters, stops_lists, st.lists(st.integers(0, 30), max_size=10))
def test_any_pieces_give_the_text_up_to_the_first_match(text: str, stops: list[str], borders: list[int]) -> None:
    filtered = StopStrings(stops)
    shown = ""
    for piece in pieces_of(text, borders):
        shown += filtered.feed(piece)
        assert text.startswith(shown)
    shown += filtered.flush()
    assert shown == by_definition(text, stops)
    assert filtered.has_matched == (shown != text)
    assert filtered.flush() == ""


OVERLAPPING = [
    ["aab", "ab"],
    ["aba", "bab"],
    ["aaaa", "aa"],
    ["b\n", "\nb", "b\nb"],
    ["ab", "abab", "b"],
    ["aabaab", "abaabb"],
    ["a"],
]


@pytest.mark.parametrize("stops", OVERLAPPING, ids=repr)
@pytest.mark.parametrize("shows_match", [False, True])
def test_each_short_text_cut_everywhere_gives_the_text_up_to_the_first_match(
    stops: list[str], shows_match: bool
) -> None:
    for text in map("".join, itertools.product("ab\n", repeat=6)):
        expected = by_definition(text, stops, shows_match=shows_match)
        for pieces in cuts(text):
            filtered = StopStrings(stops, shows_match=shows_match)
            assert "".join(map(filtered.feed, pieces)) + filtered.flush() == expected, (text, pieces)


JOINED = "\U0001f469\u200d\U0001f467"
TALK = ["</s>", "<", "s>", "世界", "世", "\n\n", "e\u0301", "e", "\u0301", JOINED, "\u200d", "Human:", " ", "\ufffd"]
talks = st.lists(st.sampled_from(TALK), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_by_token", [False, True])
def test_a_stop_string_is_found_in_tokens_that_end_in_the_middle_of_it_and_of_a_character(
    kind: str, is_by_token: bool
) -> None:
    words = vocabulary(kind)

    @settings(max_examples=200)
    @given(talks, st.lists(st.sampled_from(TALK), min_size=1, max_size=4), seeds, st.booleans(), st.booleans())
    def check(text: str, stops: list[str], seed: int, shows_match: bool, is_broken: bool) -> None:
        tokens = words.encode(text)
        tokens = tokens[:-1] if is_broken else tokens  # ends in the middle of a character, maybe
        filtered = StopStrings(stops, shows_match=shows_match)
        detokenizer = words.codec.detokenizer()
        shown = (
            TokenText(detokenizer, filtered, has_logprobs=False) if is_by_token else PlainText(detokenizer, filtered)
        )
        answer = "".join(shown.feed(piece, []) for piece in cut(tokens, seed)) + shown.finish()
        whole = words.whole(tokens)
        assert answer == by_definition(whole, stops, shows_match=shows_match)
        assert shown.has_stopped == any(stop in whole for stop in stops)

    check()


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    filtered = StopStrings(["</s>"])
    assert [filtered.feed(piece) for piece in ["a<", "b</", "s", " c"]] == ["a", "<b", "", "</s c"]


async def test_a_stop_string_across_tokens_ends_the_stream_and_aborts_the_request(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one STOPPED two", add_special_tokens=False).ids
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, 2]])
    served.engine.pause_s = 0.02
    stream = await served.client.chat.completions.create(
        model="tiny-moe", messages=[{"role": "user", "content": "hi"}], stream=True, stop=["STOPPED", "never"]
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"
    await asyncio.to_thread(served.engine.wait_for_abort, served.engine.requests[0].id, 1.0)


async def test_a_plain_answer_ends_at_a_stop_string_with_the_tokens_that_came(
    served: Served, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one STOP", add_special_tokens=False).ids
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, 2]])
    served.engine.is_holding = True
    _, body = await served.complete(stop="STOP")
    assert body["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == len(ids)


async def test_what_was_held_back_is_shown_once_when_no_stop_string_comes(served: Served, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one STO", add_special_tokens=False).ids
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, 2]])
    _, body = await served.complete(stop="STOP")
    assert body["choices"][0]["text"] == "one STO"
    _, body = await served.chat(stop=["STOP"], max_tokens=5)
    assert body["choices"][0]["message"]["content"] == "one STO"
