"""`continuous_usage_stats`: each event tells how many tokens there are so far, those without text included."""

import pytest
from tokenizers import Tokenizer

from tests.gateway.conftest import Served
from tests.gateway.fake_engine import updates_for
from tests.gateway.test_answers import END, HELLO, ids_of

EACH = {"include_usage": True, "continuous_usage_stats": True}


async def counts(served: Served, **fields: object) -> list[tuple[str, int | None]]:
    """Text and tokens so far of every event that has a choice, the opening one left out."""
    stream = await served.client.completions.create(
        model="tiny-moe", prompt="x", stream=True, stream_options={"include_usage": True}, extra_body=fields
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    return [(c.choices[0].text, c.usage.completion_tokens if c.usage else None) for c in chunks[:-1]]


async def test_a_token_without_text_has_an_event_that_counts_it(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "世")  # one character of several byte tokens
    assert len(ids) > 1
    served.engine.pause_s = 0.02
    served.engine.script = lambda request: updates_for(request, [[token] for token in [*ids, END]])
    found = await counts(served, stream_options=EACH)
    shown = [("", n) for n in range(1, len(ids))] + [("世", len(ids))]
    assert found == [*shown, ("", len(ids) + 1), ("", len(ids) + 1)]  # the stop token, and the finish
    assert await counts(served) == [("世", None), ("", None)]


async def test_tokens_that_come_together_are_counted_together(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one two three")
    served.engine.script = lambda request: updates_for(request, [ids], "length")
    assert await counts(served, stream_options=EACH) == [("one two three", len(ids)), ("", len(ids))]


async def test_of_several_choices_each_counts_its_own(served: Served, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one two")
    served.engine.script = lambda request: updates_for(request, [ids], "length")
    stream = await served.client.chat.completions.create(
        model="tiny-moe", messages=HELLO, n=2, stream=True, extra_body={"stream_options": EACH}
    )
    chunks = [chunk async for chunk in stream]
    told = [(c.choices[0].index, c.usage.completion_tokens) for c in chunks if c.choices and c.usage]
    assert sorted(told) == [(0, len(ids)), (0, len(ids)), (1, len(ids)), (1, len(ids))]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2 * len(ids)


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"continuous_usage_stats": 1}])
async def test_without_the_usage_at_the_end_it_is_refused(served: Served, options: dict[str, object]) -> None:
    status, body = await served.complete(stream=True, stream_options=options)
    assert status == 400 and body["error"]["param"] == "stream_options.continuous_usage_stats"
