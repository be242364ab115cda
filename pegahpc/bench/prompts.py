"""What prompts are made of: random token ids, or random words; and the watch that no prompt comes twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Literal, Protocol

import msgspec

from pegahpc.config import ConfigError

Form = Literal["tokens", "text", "chat"]
Prompt = list[int] | str
MAX_REDRAWS = 100
# Short and common: about one token each, whatever the tokenizer.
_TEXT = """
about after again air all also and animal another answer any are around ask away back be because been before below
between big book both boy but by call came can change city come could country day did different do does dog door down
each earth eat end even every eye far father few find first follow food for found four from garden get girl give go
good great group grow had hand hard has have he head hear help her here high him his home house how idea if in into is
it its just keep kind know land large last later learn leave left let letter life light like line list little live
long look made make man many may me mean men might mile more morning most mother mountain move much music must my name
near need never new next night no not now number of off often old on once one only open or other our out over own page
paper part people picture place plant play point put question quick read really right river run said same saw say
school sea second see seem sentence she should show side small so some something song soon sound spell stand start
state still stop story street study such sun take talk tell than that the their them then there these they thing think
this thought three through time to together too took tree try turn two under until up us use very walk want was watch
water way we well went were what when where which while white who why will with without word work world would write
year you young
"""
WORDS = tuple(_TEXT.split())


class Material(Protocol):
    """Makes prompts of a length."""

    @property
    def form(self) -> Form:
        """What they are."""
        ...

    def draw(self, rng: Random, length: int) -> Prompt:
        """A piece of prompt, `length` tokens (or words) long."""
        ...


@dataclass(frozen=True)
class TokenMaterial:
    """Token ids, uniform over a vocabulary without its special tokens.

    Args:
        size: ids are below it.
        special: ids that are never drawn.
    """

    size: int
    special: frozenset[int] = frozenset()
    form: Form = "tokens"

    def draw(self, rng: Random, length: int) -> list[int]:
        """`length` ids."""
        ids: list[int] = []
        while len(ids) < length:
            token = rng.randrange(self.size)
            if token not in self.special:
                ids.append(token)
        return ids


@dataclass(frozen=True)
class WordMaterial:
    """English words at random. How many tokens they are, the server's usage says."""

    form: Form = "text"

    def draw(self, rng: Random, length: int) -> str:
        """`length` words."""
        return " ".join(rng.choice(WORDS) for _ in range(length))


def join(before: Prompt, after: Prompt) -> Prompt:
    """One prompt of two pieces of the same kind; an empty text joins with anything."""
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    assert isinstance(before, str) and isinstance(after, str)
    return f"{before} {after}" if before else after


def digest(prompt: Prompt) -> bytes:
    """Equal for equal prompts only."""
    return blake2b(msgspec.msgpack.encode(prompt), digest_size=16).digest()


class NoTwoAlike:
    """Sees every prompt of a run. Identical prompts choose identical experts, and a step then reads too few weights."""

    def __init__(self, *, allows_twins: bool) -> None:
        self._allows_twins = allows_twins
        self._seen: set[bytes] = set()
        self.num_twins = 0

    def drawn(self, draw: Callable[[], Prompt], *, what: str) -> Prompt:
        """The first draw that was not seen before.

        Raises:
            ConfigError: there seem to be no more.
        """
        for _ in range(MAX_REDRAWS):
            prompt = draw()
            if digest(prompt) not in self._seen:
                self._seen.add(digest(prompt))
                return prompt
        raise ConfigError(f"--input-tokens: prompts of {what} are too short for so many different ones")

    def given(self, prompt: Prompt, *, where: str) -> None:
        """A prompt that somebody else has chosen.

        Raises:
            ConfigError: it was there before, and twins are not allowed.
        """
        if digest(prompt) in self._seen:
            self.num_twins += 1
            if not self._allows_twins:
                raise ConfigError(
                    f"{where}: a prompt comes twice. Identical prompts choose identical experts and hit the prefix"
                    " cache, so the figures would be too good; --allow-identical-prompts measures them and marks the"
                    " result as not comparable"
                )
        self._seen.add(digest(prompt))
