"""GET /health: forward progress of every rank, the only path that needs no key."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from pegahpc.gateway.appkeys import ENGINES, GATE
from pegahpc.gateway.documents import Health, Pulse
from pegahpc.gateway.rank_link import RankLink


async def health(request: web.Request) -> web.Response:
    """200 while every rank's step advances (idle steps count), else 503 that names the ranks that do not."""
    engines = request.app[ENGINES]
    if stalled := engines.stalled():
        names = ", ".join(str(link.rank) for link in stalled)
        pulses = [_pulse(link) for link in stalled]
        return _json(503, Health(status="stalled", message=f"no progress on rank {names}", ranks=pulses))
    status: Literal["draining", "ok"] = "draining" if request.app[GATE].is_draining else "ok"
    return _json(200, Health(status=status, ranks=[_pulse(link) for link in engines.links]))


def _pulse(link: RankLink) -> Pulse:
    return Pulse(rank=link.rank, step=link.step, silent_for_s=round(link.silent_for_s(), 3))


def _json(status: int, document: Health) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")
