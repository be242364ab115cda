"""The OpenAPI document says what the gateway does: all routes, real bodies, and whatever schemathesis thinks of."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegahpc.gateway.documents import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Document
from pegahpc.gateway.openapi import make_document
from pegahpc.wire.messages import Finished, Request, RequestUpdate, Scheduled, TokenLogprob
from tests.gateway.conftest import Served
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.test_process import Gateway, document, engine  # noqa: F401 (fixtures)

NUM_IDS = 3072
# Fields may contradict each other, which no schema says: what it allows may be a 400.
CHECKS = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
QUIET = ["--no-color", "--output-sanitize", "false", "--warnings", "off"]


@pytest.fixture
def api() -> dict[str, Any]:
    api: dict[str, Any] = json.loads(make_document("tiny-moe"))
    return api


VALIDATE = "import json, sys, schemathesis; schemathesis.openapi.from_dict(json.load(sys.stdin)).validate()"


def test_the_document_is_valid_openapi(api: dict[str, Any]) -> None:
    assert validate(api) == ""
    api["paths"]["/health"]["get"]["responses"]["200"]["content"] = 7
    assert '7 is not of type "object"' in validate(api)


def validate(api: dict[str, Any]) -> str:
    """What is wrong with it; in a process of its own, because pytest would rewrite all of schemathesis."""
    command = [sys.executable, "-P", "-c", VALIDATE]
    return subprocess.run(command, input=json.dumps(api), capture_output=True, text=True, timeout=60).stderr


def test_every_reference_of_the_document_has_an_end(api: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": "#/components/(\w+)/([\w-]+)"', json.dumps(api)))
    assert len(references) > 30
    assert not [(kind, name) for kind, name in references if name not in api["components"][kind]]


async def test_every_route_is_in_the_document_and_every_path_of_it_is_a_route(
    served: Served, api: dict[str, Any]
) -> None:
    routes = {
        (route.method.lower(), re.sub(r":[^}]+", "", route.resource.canonical))
        for route in served.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method, path) for path, methods in api["paths"].items() for method in methods}
    assert routes == described
    async with served.http.get(served.url + "/openapi.json") as response:
        assert (response.status, await response.json()) == (200, api)


async def test_the_document_needs_the_key_as_everything_does_that_it_does_not_call_open(
    served: Served, api: dict[str, Any]
) -> None:
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            url = served.url + path.format(model="tiny-moe")
            async with served.http.request(method, url, headers={"Authorization": ""}) as response:
                assert (response.status == 401) == (operation.get("security") != []), path


def faithful(request: Request) -> Sequence[RequestUpdate]:
    """A few tokens of any kind, with the logprobs that were asked for, as a correct engine gives them."""
    draw = random.Random(request.id)
    tokens = [draw.randrange(NUM_IDS) for _ in range(min(request.max_tokens, draw.randrange(1, 5)))]

    def logprob(token: int, num_top: int) -> TokenLogprob:
        return TokenLogprob(
            token=token, logprob=-1.5, rank=1, top=[(token, -1.5), *((i, -9.0) for i in range(num_top))]
        )

    updates = [RequestUpdate(id=request.id, tokens=[token]) for token in tokens] or [RequestUpdate(id=request.id)]
    if request.logprobs is not None:
        for update in updates:
            update.logprobs = [logprob(token, request.logprobs) for token in update.tokens]
    if request.prompt_logprobs is not None:
        updates[0].prompt_logprobs = [logprob(token, request.prompt_logprobs) for token in request.prompt_tokens[1:]]
    updates[0].scheduled, updates[0].cached_tokens = Scheduled(queued_at_s=1.0, scheduled_at_s=1.5), 0
    updates[-1].terminal = Finished(
        reason="length" if len(tokens) == request.max_tokens else "stop",
        prompt_tokens=len(request.prompt_tokens),
        completion_tokens=len(tokens),
    )
    return updates


@pytest.fixture
def fuzzed(document: dict[str, object], engine: FakeEngine) -> Iterator[str]:  # noqa: F811
    """The URL of a gateway's own process before a rank that does its work."""
    engine.script = faithful
    gateway = Gateway(document)
    yield gateway.listening()
    gateway.process.terminate()
    status, log = gateway.end()
    assert status == 0 and "Traceback" not in log, log


@pytest.mark.slow
def test_schemathesis_finds_no_500_and_no_answer_that_is_not_described(
    api: dict[str, Any],
    fuzzed: str,
    engine: FakeEngine,  # noqa: F811
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    num_examples = int(str(pytestconfig.getoption("fuzz_examples")))
    command = [sys.executable, "-P", "-m", "schemathesis.cli", "run", f"{fuzzed}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {engine.secret.api_key}", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", str(num_examples), "--generation-deterministic", *CHECKS, *QUIET]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"NO_PROXY": "127.0.0.1"}, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    num_paths = len(api["paths"]) - 1  # it reads its own, and tests the others
    assert re.search(rf"Selected: {num_paths}/{num_paths}\s+Tested: {num_paths}\b", done.stdout), done.stdout
    assert len(engine.requests) > 100  # it comes through to the ranks


ASKED: list[dict[str, Any]] = [
    {},
    {"n": 2, "max_tokens": 3},
    {"prompt_logprobs": 2},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
]


@pytest.mark.parametrize("fields", ASKED)
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_answers_and_events_are_of_the_described_types_to_the_last_field(
    served: Served, kind: str, fields: dict[str, Any]
) -> None:
    served.engine.script = faithful
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 3} if kind == "chat" else {"logprobs": 3}
    whole, chunk = (ChatCompletion, ChatCompletionChunk) if kind == "chat" else (Completion, CompletionChunk)
    for more in ({}, logprobs) if "prompt_logprobs" not in fields else ({},):
        asked = {"model": "tiny-moe", **fields, **more}
        body = asked | ({"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "a b c"})
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        async with served.http.post(served.url + path, json=body) as response:
            data = await response.read()
        assert response.status == 200, data
        if not fields.get("stream"):
            check(data, whole)
            continue
        *events, done, end = data.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        ends = sum(b'"finish_reason":"' in event for event in events)  # an answer without text has no other events
        assert ends == fields.get("n", 1)
        for event in events:
            check(event.removeprefix(b"data: "), chunk)


def check(data: bytes, kind: type[Document]) -> None:
    """Nothing but the type's fields, at every depth: what was read is all that there was."""
    read = json.loads(msgspec.json.encode(msgspec.json.decode(data, type=kind)))
    assert without_nulls(read) == without_nulls(json.loads(data))


def without_nulls(value: Any) -> Any:
    """A field that may be left out is null when it is read."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
