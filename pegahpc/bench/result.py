"""The result document: figures with their conditions, and beside it the raw requests that they follow from."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from pegahpc.atomic import write_atomically
from pegahpc.bench.cells import Cell, make_cell
from pegahpc.bench.claims import headline, no_claim_reasons
from pegahpc.bench.figures import figures, parse_limits
from pegahpc.bench.records import Record
from pegahpc.config import ConfigError

SCHEMA_VERSION = 1
RAW_SUFFIX = ".requests.jsonl"
_sorted_json = msgspec.json.Encoder(order="sorted")


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The file of records that lies beside the result."""

    name: str
    sha256: str
    num_requests: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Args:
        no_claim: why the run supports no claim by itself, whatever it is compared with; empty: it does.
        client: who measured. server: what was measured. Both as `provenance` and `served` have them.
        workload: what was asked, apart from the points.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Literal["pegahpc_bench"] = "pegahpc_bench"
    headline: str
    no_claim: list[str]
    client: dict[str, Any]
    server: dict[str, Any]
    labels: dict[str, str]
    workload: dict[str, Any]
    num_identical_prompts: int
    slo: str | None
    max_failures: float
    num_devices: int | None
    cells: list[Cell]
    raw: Raw


def raw_bytes(records: Sequence[Record]) -> bytes:
    """Records as JSON lines."""
    return b"".join(_sorted_json.encode(record) + b"\n" for record in records)


def raw_of(path: Path, data: bytes, num_requests: int) -> Raw:
    """What the result at `path` says of its raw file."""
    return Raw(name=path.stem + RAW_SUFFIX, sha256=sha256(data).hexdigest(), num_requests=num_requests)


def write_result(path: Path, result: Result, raw: bytes) -> None:
    """The raw requests first, then the result that vouches for them; each is whole or not there.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        write_atomically(path.with_name(result.raw.name), raw)
        write_atomically(path, msgspec.json.format(_sorted_json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror or error}") from None


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        ConfigError: the file cannot be read, or is no result of this version.
    """
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no result of `pegahpc bench run`: {error}") from None
    if result.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"{path}: has schema version {result.schema_version}, this pegahpc reads {SCHEMA_VERSION}")
    return result


def read_raw(path: Path, result: Result) -> list[Record] | None:
    """The raw requests beside a result; None: they are not there, or not those that it vouches for."""
    try:
        data = path.with_name(result.raw.name).read_bytes()
    except OSError:
        return None
    if sha256(data).hexdigest() != result.raw.sha256:
        return None
    return [msgspec.json.decode(line, type=Record) for line in data.splitlines()]


def follows_from_raw(result: Result, records: Sequence[Record]) -> bool:
    """Whether all that a result says of itself can be derived again: figures, markers, reasons, headline."""
    if len(records) != result.raw.num_requests:
        return False
    cells = [_derived(cell, result, records) for cell in result.cells]
    no_claim = no_claim_reasons(
        cells,
        num_identical_prompts=result.num_identical_prompts,
        client=result.client,
        server=result.server,
    )
    return cells == result.cells and (no_claim, headline(cells, no_claim)) == (result.no_claim, result.headline)


def _derived(cell: Cell, result: Result, records: Sequence[Record]) -> Cell:
    limits = parse_limits(result.slo)
    repeats = []
    for number in range(len(cell.repeats)):
        own = [record for record in records if (record.point, record.repeat) == (cell.key, number)]
        repeats.append(figures(own, limits=limits, num_devices=result.num_devices))
    return make_cell(
        cell.key,
        repeats,
        asked_sha256=cell.asked_sha256,
        experts=cell.experts,
        client_lag_ms=cell.client_lag_ms,
        max_failures=result.max_failures,
    )
