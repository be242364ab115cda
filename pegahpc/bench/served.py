"""What is known of who answers: a fleet of ours, an engine of this process, or somebody's endpoint."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pegahpc.bench import provenance
from pegahpc.bench.endpoint import Endpoint
from pegahpc.bench.prompts import TokenMaterial
from pegahpc.models.fields import UnsupportedModel
from pegahpc.models.lines import probe, read_config
from pegahpc.models.spec import ModelSpec
from pegahpc.plan import Plan, source_hash
from pegahpc.wire.keys import FleetSecret


@dataclass(frozen=True, kw_only=True)
class KnownFleet:
    """A fleet by its record.

    Args:
        source: of the code that it runs (`source_hash`); config: resolved. Both empty in records of old fleets.
        devices: of each rank, "cpu" or "cuda:N".
        endpoints: of each rank's wire.
    """

    name: str
    url: str
    model: str
    host: str
    source: str
    fingerprint: str
    config: dict[str, Any]
    devices: list[str]
    endpoints: list[str]
    secret: FleetSecret

    @property
    def model_folder(self) -> Path:
        """Where its checkpoint is, if its file system is this one's."""
        return Path(self.config.get("model", {}).get("path", "/nowhere"))

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together."""
        limit: int | None = self.config.get("model", {}).get("max_model_len")
        return limit


def of_fleet(fleet: KnownFleet, *, kind: str) -> dict[str, Any]:
    """What the record, this checkout and this machine tell of a fleet; what they do not is None."""
    is_here = fleet.host == socket.gethostname()
    return {
        "kind": kind,
        "name": fleet.name,
        "model_name": fleet.model,
        "fingerprint": fleet.fingerprint,
        "code": provenance.own_code() if fleet.source == source_hash() else None,
        "config": provenance.public_config(fleet.config) or None,
        "model": provenance.model_files(fleet.model_folder),
        "hardware": provenance.machine() if is_here else None,
        "versions": provenance.versions() if fleet.source == source_hash() else None,
        "device": fleet.devices[0].partition(":")[0] if fleet.devices else None,
    }


def of_engine(plan: Plan) -> dict[str, Any]:
    """An engine in this process."""
    return {
        "kind": "engine",
        "name": "engine",
        "model_name": plan.fleet.model.name,
        "fingerprint": plan.fingerprint,
        "code": provenance.own_code(),
        "config": provenance.public_config(json.loads(json.dumps(asdict(plan.fleet)))),
        "model": provenance.model_files(Path(plan.fleet.model.path)),
        "hardware": provenance.machine(),
        "versions": provenance.versions(),
        "device": plan.fleet.cluster.device,
    }


def of_endpoint(endpoint: Endpoint, url: str) -> dict[str, Any]:
    """An endpoint by what it says of itself: next to nothing."""
    return {
        "kind": "endpoint",
        "name": url,
        "model_name": endpoint.card.id,
        "fingerprint": None,
        "code": None,
        "config": None,
        "model": None,
        "hardware": None,
        "versions": None,
        "device": None,
    }


def with_labels(server: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """What could not be found out is what the user says of it; what was found out stands."""
    return {name: labels.get(name) if value is None else value for name, value in server.items()}


def vocabulary(folder: Path) -> TokenMaterial | None:
    """Token ids that a checkpoint's prompts may have: without added tokens, which may end or steer an answer.

    None: the checkpoint is not here, or of no line that we know.
    """
    spec = model_spec(folder)
    if spec is None:
        return None
    size, added = spec.vocab_size, frozenset[int]()
    if (folder / "tokenizer.json").is_file():
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = frozenset(token["id"] for token in tokenizer.get("added_tokens", []))
        words = tokenizer.get("model", {}).get("vocab")
        if words:  # ids beyond are padding of the table
            size = min(size, max(len(words) + len(added), 1))
    return TokenMaterial(size, added)


def model_spec(folder: Path) -> ModelSpec | None:
    """The checkpoint's structure; None: it is not here, or of no line that we know."""
    try:
        return probe(read_config(folder))
    except UnsupportedModel:
        return None
