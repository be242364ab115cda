"""`pegahpc chat`: talk to a fleet from the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegahpc.launch.endpoint import Endpoint, EndpointError

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it"


class Conversation:
    """The turns so far and how answers are drawn.

    Args:
        settings: fields of the request beside model and messages.
    """

    def __init__(self, endpoint: Endpoint, model: str, *, system: str | None, settings: dict[str, Any]) -> None:
        self._endpoint = endpoint
        self._settings = {"model": model} | settings
        self._opening = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = list(self._opening)

    def ask(self, message: str, show: Callable[[str], None]) -> str:
        """Send one message, pass the pieces of the answer to `show` as they come; the whole answer.

        Raises:
            EndpointError: the turn failed; the conversation is as it was before.
        """
        turns = [*self._turns, {"role": "user", "content": message}]
        pieces: list[str] = []
        for event in self._endpoint.stream(self._settings | {"messages": turns}):
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                pieces.append(piece)
                show(piece)
        answer = "".join(pieces)
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def reset(self) -> None:
        """Forget all turns."""
        self._turns = list(self._opening)


def converse(conversation: Conversation, read: Callable[[], str], show: Callable[[str], None]) -> None:
    """Ask what the user types until the end of input."""
    show(f"{HELP}\n")
    while True:
        try:
            message = read().strip()
        except (EOFError, KeyboardInterrupt):
            show("\n")
            return
        if message == "/quit":
            return
        if message == "/reset":
            conversation.reset()
        elif message:
            _turn(conversation, message, show)


def _turn(conversation: Conversation, message: str, show: Callable[[str], None]) -> None:
    try:
        conversation.ask(message, show)
        show("\n")
    except EndpointError as error:
        show(f"\n[{error}; /reset starts anew]\n")
    except KeyboardInterrupt:
        show("\n[interrupted]\n")
