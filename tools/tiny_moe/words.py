"""The vocabulary of the grammar. The order of every list is part of the corpus: a seed draws by position."""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """A child of the stories, with the pronouns that go with the name."""

    name: str
    he: str
    his: str
    him: str


BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Dan")
GIRLS = ("Lily", "Mia", "Anna", "Sue", "Zoe", "Ella", "Kate", "Rose")
PEOPLE = (
    *(Person(name, "he", "his", "him") for name in BOYS),
    *(Person(name, "she", "her", "her") for name in GIRLS),
)
ANIMALS = ("dog", "cat", "bird", "rabbit", "mouse", "duck", "fox", "bear", "frog", "pony", "squirrel", "turtle")
ADJECTIVES = ("little", "happy", "kind", "brave", "shy", "clever", "quiet", "gentle", "funny", "old")
COLORS = ("red", "blue", "green", "yellow", "white", "brown", "pink", "orange", "purple", "black")
TOYS = (
    *("ball", "kite", "boat", "doll", "drum", "hat", "cup", "box", "book", "scarf", "bell", "lamp", "basket"),
    *("shoe", "ring", "map", "truck", "blanket"),
)
FOODS = ("cake", "apple", "bread", "soup", "pie", "pear", "cookie", "carrot", "berry tart", "sandwich")
UNCOUNTED_FOODS = ("bread", "soup")  # "some bread", never "a bread" or "two breads"
PLACES = (
    *("park", "garden", "forest", "beach", "farm", "river", "hill", "market", "school", "barn"),
    *("meadow", "old bridge", "lake", "village", "kitchen"),
)
SPOTS = (
    *("under a tree", "behind a rock", "in the tall grass", "near the gate", "on a small table"),
    *("beside the path", "under the bed", "on top of the hill", "in a wooden box", "by the water"),
)
WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "cloudy", "snowy", "bright")
FAMILY = ("mother", "father", "sister", "brother", "grandma", "grandpa", "teacher", "friend")
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
THINGS = (  # what "What is a …?" asks about, and the answer
    ("dog", "A dog is an animal. It can run and bark."),
    ("cat", "A cat is an animal. It is soft and says meow."),
    ("bird", "A bird is an animal with wings. It can fly and sing."),
    ("fish", "A fish lives in water and can swim."),
    ("frog", "A frog is a green animal that can jump."),
    ("bear", "A bear is a big animal that lives in the forest."),
    ("duck", "A duck is a bird that can swim."),
    ("kite", "A kite is a toy that flies in the wind."),
    ("boat", "A boat moves on the water."),
    ("bell", "A bell makes a ringing sound."),
)
OPPOSITES = (
    *(("day", "night"), ("big", "small"), ("hot", "cold"), ("up", "down"), ("happy", "sad")),
    *(("fast", "slow"), ("open", "closed"), ("old", "new"), ("wet", "dry"), ("soft", "hard")),
)


def a(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def capital(text: str) -> str:
    """The text with its first letter raised; the rest stays."""
    return text[0].upper() + text[1:]


def plural(count: int, noun: str) -> str:
    """The noun as it stands after a count."""
    if count == 1:
        return noun
    return noun + ("es" if noun.endswith(("x", "s")) else "s")
