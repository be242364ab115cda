"""What an endpoint is and what it honours, found out by asking before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec

from pegahpc.bench.answers import Answer, Ask
from pegahpc.bench.http_target import HttpSettings, HttpTarget
from pegahpc.bench.prompts import Material
from pegahpc.bench.records import failure_of
from pegahpc.config import ConfigError

PROBE_TOKENS = 8
REFUSED = ("http_400", "http_422")
OURS = "pegahpc"
MAX_ATTEMPTS = 4


class Unusable(RuntimeError):
    """The endpoint is not there, or does not do what a measurement needs."""


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models. `max_model_len` is ours and vLLM's."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Health(msgspec.Struct):
    ranks: list[dict[str, Any]] = []


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What an endpoint says of itself.

    Args:
        num_ranks: of a fleet of ours; None: it does not say.
    """

    card: ModelCard
    num_ranks: int | None

    @property
    def is_ours(self) -> bool:
        """Whether it is a pegahpc gateway."""
        return self.card.owned_by == OURS


async def look(target: HttpTarget, model: str | None) -> Endpoint:
    """Find the model and, of a fleet of ours, the number of its ranks.

    Raises:
        Unusable: nobody answers, or not as an OpenAI endpoint.
        ConfigError: --model names none of its models, or must choose among several.
    """
    url = target.settings.url
    status, body = await target.get(f"{url}/models")
    if status != 200:
        why = {0: "nobody answers", 401: "the API key is refused", 403: "the API key is refused"}.get(status)
        raise Unusable(f"{url}/models: {why or f'HTTP {status}'}")
    try:
        cards = {card.id: card for card in msgspec.json.decode(body, type=_Models).data}
    except msgspec.MsgspecError as error:
        raise Unusable(f"{url}/models: is no list of models: {error}") from None
    if model is None and len(cards) != 1:
        raise ConfigError(f"--model: the endpoint has {len(cards)} models, choose one: {', '.join(cards)}")
    card = cards.get(model) if model is not None else next(iter(cards.values()))
    if card is None:
        raise ConfigError(f"--model: {model!r} is none of the endpoint's: {', '.join(cards)}")
    return Endpoint(card=card, num_ranks=await _num_ranks(target) if card.owned_by == OURS else None)


async def _num_ranks(target: HttpTarget) -> int | None:
    _, body = await target.get(target.settings.url.removesuffix("/v1") + "/health")
    try:
        return len(msgspec.json.decode(body, type=_Health).ranks) or None
    except msgspec.MsgspecError:
        return None


async def probe(target: HttpTarget, material: Material, *, seed: int) -> int:
    """One small request, again without what is refused, until it works; the target then has what is honoured.

    Returns the tokens that all prompts may begin with, at most: of texts the beginning-of-sequence token, of chats
    those of a small one with its template around it.

    Raises:
        Unusable: it does not work, or the stream lacks what a measurement needs (usage, a finish reason, [DONE]).
        ConfigError: it refuses ignore_eos.
    """
    detail = ""
    for _ in range(MAX_ATTEMPTS):
        settings = target.settings
        ask, answer = _small(material, seed), Answer()
        await target.ask(ask, answer)
        reason, detail = failure_of(ask, answer, has_exact_length=False) or ("", "")
        if reason in REFUSED and (less := _without_refused(settings, detail)) is not None:
            target.settings = less
        elif settings.stream_extras and not _has_counts(answer):
            target.settings = replace(settings, stream_extras={})
        elif reason or answer.usage is None:
            raise Unusable(f"{settings.url}: a first request of {PROBE_TOKENS} tokens failed: {reason}: {detail}")
        else:
            return {"tokens": 0, "text": 1}.get(material.form, answer.usage.prompt_tokens)
    raise Unusable(f"{target.settings.url}: refuses every form of a first request: {detail}")


def _small(material: Material, seed: int) -> Ask:
    prompt = material.draw(Random(f"{seed} probe"), PROBE_TOKENS)
    if material.form == "chat":
        return Ask(prompt=[{"role": "user", "content": str(prompt)}], output_tokens=PROBE_TOKENS, session="", seed=0)
    return Ask(prompt=prompt, output_tokens=PROBE_TOKENS, session="", seed=0)


def _has_counts(answer: Answer) -> bool:
    return answer.failure is not None or len(answer.event_tokens) == len(answer.event_s)


def _without_refused(settings: HttpSettings, said: str) -> HttpSettings | None:
    """The settings without the field that a refusal names, or without the least important one; None: none is left."""
    if "ignore_eos" in said and "ignore_eos" in settings.extras:
        raise ConfigError(
            "--stop-at-eos: the endpoint refuses ignore_eos, so answers may be shorter than --output-tokens; say"
            f" --stop-at-eos to take them so ({said})"
        )
    if settings.stream_extras and ("continuous_usage_stats" in said or not settings.sends_min_tokens):
        return replace(settings, stream_extras={})
    if settings.sends_min_tokens:
        return replace(settings, sends_min_tokens=False)
    return None
