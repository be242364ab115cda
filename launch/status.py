"""`pegahpc status --json` and `ls --json`: the record as scripts want it, flat and with ages as of now."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pegahpc.launch.phase_window import shares
from pegahpc.launch.record import FleetRecord, RankEntry


def status_document(record: FleetRecord) -> dict[str, Any]:
    """One fleet; times are seconds since the epoch, 0 for what has not been."""
    gateway = record.gateway
    return {
        "name": record.name,
        "state": record.state,
        "reason": record.reason,
        "model": record.model,
        "host": record.host,
        "url": gateway.url if gateway is not None else "",
        "fingerprint": record.fingerprint,
        "rendezvous": record.rendezvous,
        "started_at": record.started_at,
        "ready_at": record.ready_at,
        "ended_at": record.ended_at,
        "record_age_s": record_age_s(record),
        "launcher": {"host": record.host, "pid": record.launcher.pid},
        "gateway": {"host": record.host, "pid": gateway.process.pid, "url": gateway.url} if gateway else None,
        "trays": [{"tray": entry.tray, "host": entry.host, "pid": entry.process.pid} for entry in record.trays],
        "ranks": [_rank(record, entry) for entry in record.ranks],
    }


def record_age_s(record: FleetRecord) -> float:
    """How long ago the record was written."""
    return round(max(0.0, time.time() - record.updated_at), 2)


def last_seen_s(record: FleetRecord, entry: RankEntry) -> float | None:
    """Age of a rank's status block; None before there is one and after the end."""
    if not record.is_live or entry.stage != "ready":
        return None
    return round(entry.last_seen_s + record_age_s(record), 2)


def _rank(record: FleetRecord, entry: RankEntry) -> dict[str, Any]:
    return {
        "rank": entry.rank,
        "tray": entry.tray,
        "host": entry.host,
        "pid": entry.process.pid if entry.process is not None else None,
        "device": entry.device,
        "endpoint": entry.endpoint,
        "stage": entry.stage,
        "progress": entry.progress,
        "step": entry.step,
        "phase": entry.phase,
        "waiting_for": entry.waiting_for,
        "running": entry.num_running,
        "waiting": entry.num_waiting,
        "phases": msgspec.structs.asdict(entry.phases),
        "phase_shares": shares(entry.recent_phases),
        "last_seen_s": last_seen_s(record, entry),
        "log": entry.log,
    }
