"""The grammar's corpus: stories, questions about them, facts and sums, plain and as chat. A seed fixes each byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from pegahpc.atomic import write_atomically
from tiny_moe import words
from tiny_moe.stories import STORIES, World, draw_world
from tiny_moe.words import a, plural

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
Exchange = tuple[str, str]  # question, answer


def add(rng: random.Random) -> Exchange:
    """A sum of two numbers up to ten."""
    x, y = rng.randint(0, 10), rng.randint(0, 10)
    return f"What is {x} plus {y}?", f"{x} plus {y} is {x + y}."


def subtract(rng: random.Random) -> Exchange:
    """A difference that is not below zero."""
    x = rng.randint(0, 10)
    y = rng.randint(0, x)
    return f"What is {x} minus {y}?", f"{x} minus {y} is {x - y}."


def gain(rng: random.Random) -> Exchange:
    """A sum in words."""
    who, toy, had = rng.choice(words.PEOPLE), rng.choice(words.TOYS), rng.randint(1, 9)
    got = rng.randint(1, 9)
    have, total = f"{words.NUMBERS[had]} {plural(had, toy)}", f"{words.NUMBERS[had + got]} {plural(had + got, toy)}"
    question = f"{who.name} has {have} and gets {words.NUMBERS[got]} more. How many does {who.he} have now?"
    return question, f"{who.name} has {total} now."


def define(rng: random.Random) -> Exchange:
    """What a thing is."""
    thing, answer = rng.choice(words.THINGS)
    return f"What is a {thing}?", answer


def count(rng: random.Random) -> Exchange:
    """Counting from one number to another."""
    first = rng.randint(1, 12)
    last = rng.randint(first + 2, min(20, first + 8))
    return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."


def greet(rng: random.Random) -> Exchange:
    """A greeting."""
    name = rng.choice(words.PEOPLE).name
    return f"Hello, my name is {name}.", f"Hello, {name}! It is nice to meet you. How can I help you?"


def oppose(rng: random.Random) -> Exchange:
    """A word and its opposite, either way round."""
    pair = rng.choice(words.OPPOSITES)
    word, opposite = pair if rng.random() < 0.5 else pair[::-1]
    return f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."


FACTS: tuple[Callable[[random.Random], Exchange], ...] = (add, subtract, gain, define, count, greet, oppose)


def ask_for_story(w: World) -> str:
    """A request that the story of this world answers."""
    return w.pick(
        [
            f"Tell me a story about {w.hero.name}.",
            f"Tell me a story about {w.hero.name} and {a(w.animal)}.",
            f"Write a short story with a {w.toy}.",
            f"Tell me a story about the {w.place}.",
            "Tell me a story.",
            "Write a short story for a child.",
        ]
    )


def document(rng: random.Random) -> str:
    """One document: 18 % facts, 37 % plain stories, 25 % stories on request, 20 % stories with questions."""
    kind = rng.random()
    if kind < 0.18:
        question, answer = FACTS[rng.randint(0, len(FACTS) - 1)](rng)
        return f"{USER}{question}{ASSISTANT}{answer}"
    world = draw_world(rng)
    sentences, answered = rng.choice(STORIES)(world)
    story = " ".join(sentences)
    if kind < 0.55:
        return story
    if kind < 0.80:
        return f"{USER}{ask_for_story(world)}{ASSISTANT}{story}"
    asked = rng.sample(answered, min(len(answered), rng.randint(1, 3)))
    first, *later = (f"{question}{ASSISTANT}{answer}" for question, answer in asked)
    return f"{USER}{story} {first}" + "".join(f"{USER}{exchange}" for exchange in later)


def documents(num_docs: int, seed: int) -> Iterator[str]:
    """The first `num_docs` documents of a seed; a longer corpus of the same seed starts with the same ones."""
    rng = random.Random(seed)
    for _ in range(num_docs):
        yield document(rng)


def corpus_text(num_docs: int, seed: int) -> str:
    """The documents as a training file: each is followed by a line that is END."""
    return "".join(f"{text}\n{END}\n" for text in documents(num_docs, seed))


def write_corpus(out: Path, num_docs: int, seed: int) -> None:
    """Write the corpus file, whole or not at all."""
    data = corpus_text(num_docs, seed).encode()
    write_atomically(out, data)
    print(f"{out}: {num_docs} documents, {len(data) / 1e6:.1f} MB")
