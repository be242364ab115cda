"""`pegahpc smoke`: a few questions that show in seconds whether a fleet works from HTTP to every rank and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pegahpc.launch.endpoint import Endpoint, EndpointError

# What assets/tiny-moe answers, greedily; the tool that trained it checks the same.
SHIPPED_MODEL = "tiny-moe"
SHIPPED_ANSWERS = {"What is 3 plus 4?": "3 plus 4 is 7."}
ANY_QUESTION = "What is 3 plus 4?"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check and what came of it."""

    name: str
    is_ok: bool
    found: str
    ms: float


def run_checks(url: str, api_key: str, model: str) -> Iterator[Check]:
    """All checks, one after the other."""
    endpoint = Endpoint(url, api_key)
    questions = list(SHIPPED_ANSWERS) if model == SHIPPED_MODEL else [ANY_QUESTION]
    yield _check("every rank makes progress", lambda: _health(endpoint))
    yield _check("without a key: 401", lambda: _refusal(Endpoint(url, None), model))
    yield _check("the model is listed", lambda: _models(endpoint, model))
    for question in questions:
        yield _check(question, lambda question=question: _answer(endpoint, model, question))  # type: ignore[misc]
    yield _check("streamed equals whole", lambda: _stream(endpoint, model, questions[0]))


def _check(name: str, run: Callable[[], tuple[bool, str]]) -> Check:
    began_s = time.monotonic()
    try:
        is_ok, found = run()
    except EndpointError as error:
        is_ok, found = False, str(error)
    return Check(name=name, is_ok=is_ok, found=found, ms=round((time.monotonic() - began_s) * 1000, 1))


def _health(endpoint: Endpoint) -> tuple[bool, str]:
    health = endpoint.get("/health")
    return health["status"] == "ok", f"{health['status']}, {len(health['ranks'])} ranks"


def _refusal(stranger: Endpoint, model: str) -> tuple[bool, str]:
    try:
        stranger.chat(_body(model, ANY_QUESTION))
    except EndpointError as error:
        return error.status == 401, f"{error.status or error}"
    return False, "answered"


def _models(endpoint: Endpoint, model: str) -> tuple[bool, str]:
    names = [card["id"] for card in endpoint.get("/v1/models")["data"]]
    return model in names, ", ".join(names)


def _answer(endpoint: Endpoint, model: str, question: str) -> tuple[bool, str]:
    document = endpoint.chat(_body(model, question))
    answer, usage = _text(document), document["usage"]
    is_counted = usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0
    wanted = SHIPPED_ANSWERS.get(question) if model == SHIPPED_MODEL else None
    return is_counted and (answer.strip() == wanted if wanted else bool(answer)), answer


def _stream(endpoint: Endpoint, model: str, question: str) -> tuple[bool, str]:
    body = _body(model, question)
    pieces = [choice["delta"].get("content") or "" for event in endpoint.stream(body) for choice in event["choices"]]
    streamed, whole = "".join(pieces), _text(endpoint.chat(body))
    return streamed == whole, "equal" if streamed == whole else f"{streamed!r} is not {whole!r}"


def _body(model: str, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}


def _text(document: Any) -> str:
    return str(document["choices"][0]["message"]["content"])
