"""The sequences that one generation asks for, each a request of its own on the wire."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from msgspec.structs import replace

from pegahpc.gateway.openai import Generation
from pegahpc.wire.messages import Request, Sampling


class Prompt(NamedTuple):
    """One prompt as the engines read it.

    Args:
        tokens: at least one.
        page_names: its full pages that a cache may have, in order (`pegahpc.page_names`).
        echo: the text that stands before the answer; "" for none.
        is_shared: a rank that has computed it spares the next request a page of it or more.
    """

    tokens: list[int]
    page_names: list[bytes]
    echo: str
    is_shared: bool


class Planned(NamedTuple):
    """One sequence: what goes over the wire, and what the gateway keeps of its prompt."""

    request: Request
    prompt: Prompt


def plan(
    generation: Generation,
    prompts: Sequence[Prompt],
    request_id: str,
    *,
    max_tokens: Sequence[int],
    stop: Sequence[int],
) -> list[Planned]:
    """All candidates of the first prompt, then those of the next, and so on.

    Without a seed of the client each prompt has a random one, so that two equal prompts get two answers.

    Args:
        max_tokens: of each prompt.
        stop: ids of stop tokens, the model's own included.
    """
    return [
        Planned(request, prompt)
        for idx, prompt in enumerate(prompts)
        for request in _candidates(
            generation,
            Request(
                id=request_id if len(prompts) == 1 else f"{request_id}.{idx}",
                prompt_tokens=prompt.tokens,
                max_tokens=max_tokens[idx],
                stop_token_ids=tuple(sorted(set(stop))),
                min_tokens=generation.min_tokens,
                logprobs=_wanted_logprobs(generation),
                prompt_logprobs=_wanted_prompt_logprobs(generation),
            ),
        )
    ]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice, unsigned 64 bits. The first has the request's own: n changes nothing for it.

    No sum: with it, choice 1 of seed 7 would be choice 0 of seed 8.
    """
    if not choice:
        return seed
    return int.from_bytes(blake2b(b"%d.%d" % (seed, choice), digest_size=8).digest(), "little")


def _candidates(generation: Generation, first: Request) -> Iterator[Request]:
    seed = random.getrandbits(64) if generation.seed is None else generation.seed
    for choice in range(generation.num_candidates):
        sampling: Sampling = replace(generation.sampling, seed=choice_seed(seed, choice))
        yield replace(first, id=f"{first.id}-{choice}" if choice else first.id, sampling=sampling)


def _wanted_logprobs(generation: Generation) -> int | None:
    """What the client sees, or what ranks the candidates."""
    if generation.logprobs is None and generation.num_candidates > generation.num_choices:
        return 0
    return generation.logprobs


def _wanted_prompt_logprobs(generation: Generation) -> int | None:
    """Of what is echoed and of what stands by itself, the most."""
    echoed = generation.logprobs if generation.is_echoed else None
    wanted = [num for num in (echoed, generation.prompt_logprobs) if num is not None]
    return max(wanted, default=None)
