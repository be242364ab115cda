"""Traces: JSONL, one request a line, at its own time, with its prompt or only its lengths."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pegahpc.bench.prompts import Prompt
from pegahpc.config import ConfigError

Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request.

    Args:
        timestamp: seconds; only differences count.
        prompt: text or token ids; without it, one of `input_tokens` is made.
        output_tokens: default: what --output-tokens draws.
    """

    timestamp: float
    prompt: Text | TokenIds | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None


@dataclass(frozen=True)
class Trace:
    """A whole trace, in the order of its times, the first at 0."""

    name: str
    sha256: str
    lines: list[TraceLine]

    @property
    def prompts(self) -> list[Prompt]:
        """Those prompts that it has."""
        return [line.prompt for line in self.lines if line.prompt is not None]


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; the message has its number.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error.strerror}") from None
    lines = [
        _line(raw, f"--trace: {path.name} line {number}")
        for number, raw in enumerate(data.splitlines(), 1)
        if raw.strip()
    ]
    if not lines:
        raise ConfigError(f"--trace: {path} has no request")
    if len({type(line.prompt) for line in lines} - {type(None)}) > 1:
        raise ConfigError(f"--trace: {path.name} has both texts and token ids; make it one kind")
    lines.sort(key=lambda line: line.timestamp)
    first = lines[0].timestamp
    shifted = [msgspec.structs.replace(line, timestamp=line.timestamp - first) for line in lines]
    return Trace(path.name, sha256(data).hexdigest(), shifted)


def _line(raw: bytes, where: str) -> TraceLine:
    try:
        line = msgspec.json.decode(raw, type=TraceLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if (line.prompt is None) == (line.input_tokens is None):
        raise ConfigError(f"{where}: either prompt or input_tokens says what is asked")
    return line
