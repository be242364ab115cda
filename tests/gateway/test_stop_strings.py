"""Stop strings: the text up to the first match, whatever the pieces, and everything exactly once without one."""

import asyncio
import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pegahpc.gateway.stop_strings import StopStrings
from tests.gateway.conftest import Served
from tests.gateway.fake_engine import updates_for

letters = st.text("ab\n", max_size=30)
stops_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def by_definition(text: str, stops: Sequence[str]) -> str:
    """Read letter by letter; at the first letter that completes a stop string, cut the longest one off."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
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
