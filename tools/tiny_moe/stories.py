"""Five kinds of story. Each keeps track of who did what, so that questions about it have known answers.

The draws of a story, their number and their order, are part of the corpus: every alternative of a sentence is built
before one is chosen, also the ones that draw themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiny_moe import words
from tiny_moe.words import Person, a, capital

Answered = list[tuple[str, str]]
Story = tuple[list[str], Answered]  # its sentences, and questions with their answers


@dataclass(frozen=True)
class World:
    """What one story is about, drawn once before it is told."""

    rng: random.Random
    hero: Person
    friend: Person
    animal: str
    other_animal: str
    adjective: str
    color: str
    toy: str
    food: str
    place: str
    other_place: str
    spot: str
    weather: str
    relative: str
    count: int  # 2 to 9

    def pick(self, choices: Sequence[str]) -> str:
        """One of the choices, each as likely."""
        return self.rng.choice(choices)

    @property
    def one_food(self) -> str:
        """The food as one eats it: "a pie", but "soup"."""
        return self.food if self.food in words.UNCOUNTED_FOODS else a(self.food)


def draw_world(rng: random.Random) -> World:
    """Draw all that a story may need, in a fixed order."""
    pick = rng.choice
    hero = pick(words.PEOPLE)
    friend = pick([person for person in words.PEOPLE if person != hero])
    animal = pick(words.ANIMALS)
    other_animal = pick([other for other in words.ANIMALS if other != animal])
    adjective, color, toy, food = (pick(of) for of in (words.ADJECTIVES, words.COLORS, words.TOYS, words.FOODS))
    place = pick(words.PLACES)
    other_place = pick([other for other in words.PLACES if other != place])
    spot, weather, relative = (pick(of) for of in (words.SPOTS, words.WEATHER, words.FAMILY))
    return World(
        rng=rng,
        hero=hero,
        friend=friend,
        animal=animal,
        other_animal=other_animal,
        adjective=adjective,
        color=color,
        toy=toy,
        food=food,
        place=place,
        other_place=other_place,
        spot=spot,
        weather=weather,
        relative=relative,
        count=rng.randint(2, 9),
    )


def opening(w: World) -> str:
    """The first sentence or two."""
    name = w.hero.name
    return w.pick(
        [
            f"One {w.weather} day, {name} went to the {w.place} with {w.hero.his} {w.relative}.",
            f"Once upon a time, there was a {w.adjective} child named {name}. {name} lived near the {w.place}.",
            f"It was a {w.weather} morning. {name} wanted to go to the {w.place}.",
            f"{name} was a {w.adjective} child who loved to play at the {w.place}.",
            f"Every day, {name} walked to the {w.place} with {a(w.animal)}.",
            f"Once there was {a(w.adjective)} {w.animal} who lived by the {w.place}."
            f" The {w.animal} had a friend named {name}.",
        ]
    )


def ending(w: World) -> str:
    """The last sentence or two."""
    name = w.hero.name
    lessons = ["share", "help others", "tell the truth", "be kind", "try again", "listen"]
    return w.pick(
        [
            f"From that day on, {name} and {w.friend.name} were good friends.",
            f"{name} felt very {w.pick(['happy', 'proud', 'glad', 'calm'])}. It was a good day.",
            f"Then they all went home and ate {w.one_food}.",
            f"That night, {name} told {w.hero.his} {w.relative} about the {w.toy}, and they smiled.",
            f"{capital(w.hero.he)} learned that it is good to {w.pick(lessons)}.",
            f"The {w.animal} was happy too. The end.",
        ]
    )


def lost(w: World) -> Story:
    """A toy is lost, and a friend helps to find it."""
    name, he, friend, toy = w.hero.name, w.hero.he, w.friend.name, f"{w.color} {w.toy}"
    story = [
        opening(w),
        w.pick([f"{capital(he)} had a {toy}.", f"{name} took {w.hero.his} favorite {toy} along."]),
        w.pick(
            [
                f"But soon the {w.toy} was gone.",
                f"Then the wind took the {w.toy} away.",
                f"After a while, {name} could not find the {w.toy}.",
            ]
        ),
        f"{name} felt {w.pick(['sad', 'worried'])}.",
        w.pick(
            [
                f'{friend} saw that {name} was sad and said, "Do not worry. I will help you look."',
                f'{capital(he)} asked {friend}, "Have you seen my {toy}?" "No," said {friend}, "but I can help you."',
            ]
        ),
        w.pick(
            [
                "They looked and looked.",
                f"They looked by the {w.other_place} and then by the {w.place}.",
                f"First they looked near the {w.other_place}, but it was not there.",
            ]
        ),
        w.pick(
            [
                f"At last, they found the {w.toy} {w.spot}.",
                f"Then {a(w.animal)} came and showed them the {w.toy} {w.spot}.",
            ]
        ),
        w.pick([f'"Thank you, {friend}!" said {name}.', f"{name} gave {friend} a big hug."]),
        ending(w),
    ]
    return story, [
        (f"What did {name} lose?", f"{name} lost a {toy}."),
        (f"Who helped {name}?", f"{friend} helped {name}."),
        (f"Where was the {w.toy}?", f"The {w.toy} was {w.spot}."),
        (f"What color was the {w.toy}?", f"The {w.toy} was {w.color}."),
    ]


def shared(w: World) -> Story:
    """Food is shared, counted where the food can be counted."""
    name, friend, kin = w.hero.name, w.friend.name, f"{w.hero.his} {w.relative}"
    given = w.rng.randint(1, w.count - 1)
    is_counted = w.food not in words.UNCOUNTED_FOODS
    total, gave, kept = (words.NUMBERS[count] for count in (w.count, given, w.count - given))
    story = [
        opening(w),
        f"{capital(kin)} gave {w.hero.him} {f'{total} {w.food}s' if is_counted else f'some {w.food}'}.",
        f"{friend} was hungry and had no food.",
        w.pick([f"{name} wanted to eat it all.", f"At first, {name} did not want to share."]),
        w.pick([f"But then {w.hero.he} saw that {friend} was sad.", f'But {kin} said, "It is kind to share."']),
        f"So {name} gave {f'{gave} to {friend} and kept {kept}' if is_counted else f'half of it to {friend}'}.",
        w.pick([f'"Yum! Thank you," said {friend}.', f'{friend} smiled and said, "You are a good friend."']),
        ending(w),
    ]
    answered = [
        ("Who was hungry?", f"{friend} was hungry."),
        ("Who shared the food?", f"{name} shared the food with {friend}."),
    ]
    if is_counted:
        answered.append((f"How many did {name} keep?", f"{name} kept {kept}."))
    return story, answered


def rescued(w: World) -> Story:
    """An animal is stuck and gets free."""
    name, he, stuck = w.hero.name, w.hero.he, w.other_animal
    traps = ["in the mud", "in a hole", "up in a tree", "under a log"]
    story = [
        opening(w),
        w.pick(
            [
                f'Suddenly, {he} heard a small voice. "Help! Help!"',
                f"{capital(he)} heard a sound near the {w.other_place}.",
            ]
        ),
        w.pick(
            [
                f"It was {a(w.adjective)} {stuck}. The {stuck} was stuck {w.pick(traps)}.",
                f"A {w.color} {stuck} was stuck {w.pick(['in the mud', 'under a log', 'in a net'])}.",
            ]
        ),
        w.pick([f"{name} was scared, but {he} wanted to help.", f'"Do not be afraid," said {name}.']),
        w.pick(
            [
                f"{capital(he)} used a long {w.pick(['stick', 'rope', 'branch'])} and pulled.",
                f"{capital(he)} called {w.friend.name}, and they pulled together.",
            ]
        ),
        f"The {stuck} was free!",
        w.pick(
            [
                f'The {stuck} said, "Thank you! You are very brave."',
                f"The {stuck} gave {w.hero.him} a {w.color} {w.toy} to say thank you.",
            ]
        ),
        ending(w),
    ]
    return story, [
        ("Who was stuck?", f"The {stuck} was stuck."),
        (f"Who helped the {stuck}?", f"{name} helped the {stuck}."),
    ]


def made(w: World) -> Story:
    """Two children make a present, and it takes two tries."""
    name, friend, kin = w.hero.name, w.friend.name, f"{w.hero.his} {w.relative}"
    story = [
        opening(w),
        f"{name} and {friend} wanted to make a {w.toy} for {kin}.",
        w.pick(
            [
                f"They needed {w.pick(['paper', 'wood', 'wool', 'paint'])}"
                f" and {w.pick(['glue', 'string', 'tape', 'a brush'])}.",
                f"They found some {w.color} paint and a little wood.",
            ]
        ),
        w.pick([f"The first {w.toy} broke, and {name} felt sad.", f"It was hard, and {friend} wanted to stop."]),
        w.pick([f'"Let us try again," said {friend}.', f'"We can do it," said {name}.']),
        f"They worked all {w.pick(['day', 'morning', 'afternoon'])}."
        f" In the end, the {w.toy} was {w.color} and {w.pick(['big', 'pretty', 'strong', 'bright'])}.",
        f'{capital(kin)} loved it and said, "What a {w.pick(["lovely", "fine", "pretty"])} {w.toy}!"',
        ending(w),
    ]
    return story, [
        ("What did they make?", f"They made a {w.color} {w.toy}."),
        ("Who was it for?", f"It was for {name}'s {w.relative}."),
    ]


def rained(w: World) -> Story:
    """Rain drives two children under a roof, where they meet an animal."""
    name, friend = w.hero.name, w.friend.name
    company = f" with {words.NUMBERS[w.count]} {w.other_animal} friends"
    if w.other_animal in ("mouse", "fox", "pony"):
        company = ""
    story = [
        f"{name} and {friend} were playing at the {w.place}.",
        w.pick(["Dark clouds came, and it began to rain.", "The sky turned gray, and the wind blew hard."]),
        w.pick([f'"We will get wet!" said {friend}.', f"{friend} was worried."]),
        f"{name} saw {w.pick(['a barn', 'a big tree', 'a little house', 'a cave'])}."
        f' "Let us wait there," {w.hero.he} said.',
        f"Inside, they met {a(w.adjective)} {w.animal}{company}.",
        f"The {w.animal} shared {w.one_food} with them.",
        w.pick(["Soon the rain stopped, and they saw a rainbow.", "After the rain, the sun came out again."]),
        ending(w),
    ]
    return story, [
        ("Who did they meet?", f"They met {a(w.adjective)} {w.animal}."),
        ("What happened after the rain?", "The sun came out and everyone was happy."),
    ]


STORIES: tuple[Callable[[World], Story], ...] = (lost, shared, rescued, made, rained)
