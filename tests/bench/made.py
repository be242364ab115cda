"""Records with numbers worked out by hand, and results of runs that went as these say."""

from pathlib import Path
from typing import Any

from pegahpc.bench.cells import make_cell
from pegahpc.bench.claims import headline, no_claim_reasons
from pegahpc.bench.figures import figures
from pegahpc.bench.records import Record
from pegahpc.bench.result import Result, raw_bytes, raw_of


def record(event_ms: list[float], **given: Any) -> Record:
    """A request that succeeded: one event a token, due and sent at 0, ended with its last event."""
    fields: dict[str, Any] = {
        "point": "c1",
        "repeat": 0,
        "conversation": 0,
        "turn": 0,
        "due_ms": 0.0,
        "sent_ms": 0.0,
        "ended_ms": event_ms[-1],
        "event_ms": event_ms,
        "asked_tokens": len(event_ms),
        "input_tokens": 10,
        "output_tokens": len(event_ms),
        "cached_tokens": 0,
        "reusable_tokens": 0,
        "finish_reason": "length",
        "output_sha256": "0",
    }
    return Record(**(fields | given))


REPEATS = 3
MODEL = {"fingerprint": "f1", "config_sha256": "c1", "tokenizer_sha256": "t1"}
MACHINE = {"host": "h", "cpu": "Xeon", "cores": 2, "gpus": [], "memory_gib": 8, "kernel": "6"}
CODE = {"commit": "a" * 40, "is_dirty": False, "dirty_files": [], "source": "s1"}
CONFIG = {"engine": {"dtype": "float32"}, "topology": {"ep_size": 1}}


def records_of(itl_ms: float = 20.0, *, point: str = "c2", jitter: float = 0.01, **given: Any) -> list[Record]:
    """Three repeats of four requests, tokens `itl_ms` apart; each repeat is slower by `jitter`."""
    made = []
    for repeat in range(REPEATS):
        gap_ms = itl_ms * (1 + jitter * repeat)
        for idx in range(4):
            events = [round(100.0 + gap_ms * number, 3) for number in range(5)]
            made.append(record(events, point=point, repeat=repeat, conversation=idx, **given))
    return made


def result_of(records: list[Record], *, max_failures: float = 0.0, asked: str = "x", **given: Any) -> Result:
    """The result that a clean run of these records would have written."""
    cells = []
    for key in dict.fromkeys(record.point for record in records):
        numbers = sorted({record.repeat for record in records if record.point == key})
        repeats = [
            figures([r for r in records if (r.point, r.repeat) == (key, number)], limits=None, num_devices=1)
            for number in numbers
        ]
        asked_sha256 = [f"{asked}{number}" for number in numbers]
        cells.append(
            make_cell(
                key,
                repeats,
                asked_sha256=asked_sha256,
                experts=[None] * len(numbers),
                client_lag_ms=[given.pop("client_lag_ms", 1.0)] * len(numbers),
                max_failures=max_failures,
            )
        )
    server = {
        "kind": "fleet",
        "name": "pegahpc",
        "model_name": "m",
        "fingerprint": "p",
        "code": CODE,
        "config": CONFIG,
        "model": MODEL,
        "hardware": MACHINE,
        "versions": {"python": "3.11", "torch": "2.13", "pegahpc": "0.1"},
        "device": "cpu",
        "honoured": ["ignore_eos"],
    } | given.pop("server", {})
    client = {"command": [], "date": "2026-12-01", "code": CODE, "hardware": MACHINE} | given.pop("client", {})
    num_twins = given.pop("num_identical_prompts", 0)
    no_claim = no_claim_reasons(cells, num_identical_prompts=num_twins, client=client, server=server)
    raw, name = raw_bytes(records), given.pop("name", "r.json")
    fields: dict[str, Any] = {
        "headline": headline(cells, no_claim),
        "no_claim": no_claim,
        "client": client,
        "server": server,
        "labels": {},
        "workload": {"seed": 0, "form": "tokens", "input_tokens": "128"},
        "num_identical_prompts": num_twins,
        "slo": None,
        "max_failures": max_failures,
        "num_devices": 1,
        "cells": cells,
        "raw": raw_of(Path(name), raw, len(records)),
    }
    return Result(**(fields | given))
