"""The shipped model passes its own acceptance check, and the check can fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tiny_moe.accept import PROMPTS, Answer, accept

SHIPPED_FOLDER = Path(__file__).parents[2] / "assets" / "tiny-moe"


@pytest.mark.slow
def test_the_shipped_model_is_accepted() -> None:
    assert accept(SHIPPED_FOLDER) == []


def test_a_wrong_sum_and_a_draft_that_changes_a_token_are_refused() -> None:
    prompt = next(prompt for prompt in PROMPTS if prompt.text == "What is 3 plus 4?")
    good = Answer(prompt, "3 plus 4 is 7.", num_tokens=9, num_forwards=5, is_same_with_mtp=True)
    assert good.complaint == ""
    assert dataclasses.replace(good, text="3 plus 4 is 8.").complaint == "does not say ' 7.'"
    assert dataclasses.replace(good, is_same_with_mtp=False).complaint == "MTP changed the tokens"
