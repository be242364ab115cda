"""Clients that never stop asking, each in a thread of its own, and how each of their requests ended."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from contextlib import closing
from typing import Literal, NamedTuple

DONE = b"data: [DONE]\n\n"
Ending = Literal["done", "told", "broken", "refused"]  # told: an error in words; refused: nobody listened


class Outcome(NamedTuple):
    """One request's end."""

    began_s: float
    ended_s: float
    ending: Ending
    said: str


class Clients:
    """Used as a context; on leaving, everybody has hung up."""

    def __init__(self, url: str, key: str, *, num_clients: int, seed: int) -> None:
        self._host, self._key = url.removeprefix("http://").removesuffix("/v1"), key
        self._is_over = threading.Event()
        self.outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._ask_on, args=(random.Random(f"{seed} {number}"),))
            for number in range(num_clients)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, draw: random.Random) -> None:
        while not self._is_over.is_set():
            prompt = " ".join(draw.choice(["the", "dog", "ran", "home", "and", "saw", "Tom"]) for _ in range(20))
            body = {"model": "tiny-moe", "prompt": prompt[: draw.randrange(2, 80)], "ignore_eos": True,
                    "max_tokens": draw.randrange(1, 60), "stream": draw.random() < 0.5}  # fmt: skip
            began_s = time.monotonic()
            ending, said = self._ask(body)
            outcome = Outcome(began_s, time.monotonic(), ending, said)
            self.outcomes.append(outcome)
            if outcome.ending != "done":
                self._is_over.wait(0.05)

    def _ask(self, body: dict[str, object]) -> tuple[Ending, str]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection(self._host, timeout=30)) as connection:
            try:
                connection.connect()
            except OSError as error:
                return "refused", str(error)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                response = connection.getresponse()
                return _ending(response.status, response.read())
            except (OSError, http.client.HTTPException) as error:
                return "broken", repr(error)


def _ending(status: int, answer: bytes) -> tuple[Ending, str]:
    last = answer.strip().split(b"\n\n")[-1].removeprefix(b"data: ")
    if status == 200 and (answer.endswith(DONE) or b'"finish_reason":' in last):
        return "done", ""
    if b'"error"' in last:
        return "told", str(json.loads(last)["error"]["message"])
    return "broken", answer.decode(errors="replace")[-200:]
