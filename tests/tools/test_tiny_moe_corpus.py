"""The corpus is the one that the shipped model was trained on: hashes come from the script that was run then."""

import hashlib

import pytest

from tiny_moe.corpus import corpus_text, documents
from tiny_moe.distill import clean, is_good


@pytest.mark.parametrize(
    ("seed", "sha256"),
    [
        (0, "d750f4d22663779fc1a08a029ae41b6c38a6f8f246348ad6211bb3d528b8d49d"),
        (7, "ee41a154491c530437cba08d0ecf412b521f0e71dc259ca6c123f04c718d4e67"),
    ],
)
def test_two_thousand_documents_are_byte_for_byte_the_ones_trained_on(seed: int, sha256: str) -> None:
    assert hashlib.sha256(corpus_text(2000, seed).encode()).hexdigest() == sha256


def test_a_longer_corpus_starts_with_the_shorter_one() -> None:
    assert corpus_text(30, 1).startswith(corpus_text(10, 1))


def test_no_documents_are_an_empty_corpus() -> None:
    assert corpus_text(0, 0) == ""


def test_every_sum_is_right() -> None:
    sums = [text for text in documents(3000, 5) if "<|assistant|>" in text and " plus " in text and " is " in text]
    assert len(sums) > 20
    for text in sums:
        left, right = text.split("<|assistant|>")[1].rstrip(".").split(" is ")
        first, second = left.split(" plus ")
        assert int(first) + int(second) == int(right)


def test_a_distilled_story_is_cut_after_its_last_sentence() -> None:
    assert clean("user\nWrite.\nassistant\nA dog  ran.\nIt was fun! Then the") == "A dog ran. It was fun!"
    assert clean("assistant\nNo end here") == ""


def test_loops_markup_and_short_texts_are_not_good_stories() -> None:
    story = " ".join(f"Word{number} and word{number} met." for number in range(20))
    assert is_good(story)
    assert not is_good(" ".join(story.split()[:39]))
    assert not is_good("The dog ran to the park. " * 10)
    assert not is_good(story + " <b>")
    assert not is_good(story + " caf\u00e9")
