"""Logprobs as the two endpoints write them: a list of objects for chats, four parallel lists for completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pegahpc.gateway.text import Shown
from pegahpc.wire.messages import TokenLogprob

LEAST_LOGPROB = -9999.0  # what OpenAI writes for "very unlikely"; JSON has no -infinity

TokenBytes = Callable[[int], bytes | None]  # None: the id stands for nothing


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative. A piece of a character is U+FFFD in `token`, and itself in `bytes`."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token, and the most probable ones, which may not include it."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a chat."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a completion; the first token of an echoed prompt has null twice.

    Args:
        top_logprobs: the most probable texts, and the chosen one; of two tokens with one text, the more probable.
        text_offset: where each token's text begins in the choice's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One entry of vLLM's `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


LogprobShape = Callable[[Sequence[Shown], int, TokenBytes], ChatLogprobs | CompletionLogprobs]


def chat_logprobs(shown: Sequence[Shown], num_top: int, token_bytes: TokenBytes) -> ChatLogprobs:
    """The chat's form of the tokens that were shown."""

    def top(token: int, logprob: float) -> TopLogprob:
        raw = token_bytes(token)
        return TopLogprob(_text(raw), _finite(logprob), None if raw is None else list(raw))

    content = []
    for of in shown:
        assert of.logprob is not None
        chosen = top(of.token, of.logprob.logprob)
        best = [top(token, logprob) for token, logprob in of.logprob.top[:num_top]]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, best))
    return ChatLogprobs(content)


def completion_logprobs(shown: Sequence[Shown], num_top: int, token_bytes: TokenBytes) -> CompletionLogprobs:
    """The completion's form of the tokens that were shown."""
    return CompletionLogprobs(
        tokens=[_text(token_bytes(of.token)) for of in shown],
        token_logprobs=[None if of.logprob is None else _finite(of.logprob.logprob) for of in shown],
        top_logprobs=[None if of.logprob is None else _by_text(of.logprob, num_top, token_bytes) for of in shown],
        text_offset=[of.offset for of in shown],
    )


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob], num_top: int, token_bytes: TokenBytes
) -> list[dict[str, PromptLogprob] | None]:
    """By token id, as vLLM writes them: null for the first token, then each prompt token and the most probable ones."""
    listed: list[dict[str, PromptLogprob] | None] = [None]
    for of in logprobs:
        best = [(token, rank, logprob) for rank, (token, logprob) in enumerate(of.top[:num_top], start=1)]
        listed.append(
            {
                str(token): PromptLogprob(_finite(logprob), rank, _text(token_bytes(token)))
                for token, rank, logprob in [*best, (of.token, of.rank, of.logprob)]
            }
        )
    return listed


def _by_text(of: TokenLogprob, num_top: int, token_bytes: TokenBytes) -> dict[str, float]:
    texts: dict[str, float] = {}
    for token, logprob in [*of.top[:num_top], (of.token, of.logprob)]:
        texts.setdefault(_text(token_bytes(token)), _finite(logprob))
    return texts


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
