"""The documents that start a fleet's processes; each travels on standard input as msgpack."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pegahpc.config import FleetConfig
from pegahpc.launch.children import python_module
from pegahpc.rank import RankContext


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """Command lines of the processes that a fleet is made of."""

    tray: list[str] = msgspec.field(default_factory=lambda: python_module("pegahpc.launch.tray"))
    rank: list[str] = msgspec.field(default_factory=lambda: python_module("pegahpc.launch.rank"))
    gateway: list[str] = msgspec.field(default_factory=lambda: python_module("pegahpc.gateway.main"))


class FleetBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher starts: a resolved fleet whose folder, claim and secret are there."""

    fleet: FleetConfig
    run_id: str
    fingerprint: str
    num_experts: int
    programs: Programs = msgspec.field(default_factory=Programs)

    @property
    def folder(self) -> Path:
        """The fleet's folder."""
        return self.fleet.folder

    @property
    def secret_path(self) -> Path:
        """The fleet's secret, mode 0600."""
        return self.folder / "secret"

    @property
    def bind_host(self) -> str:
        """The address that a fleet's own ports bind."""
        return "127.0.0.1"  # cluster.kind has no other value than local yet


class TrayBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What one tray process runs."""

    boot: FleetBoot
    tray: int
    parent: int  # pid of the launcher; another parent means that it is gone

    def context(self, local_rank: int) -> RankContext:
        """Who the tray's rank `local_rank` is."""
        topology, device = self.boot.fleet.topology, self.boot.fleet.cluster.device
        rank = self.tray * topology.ranks_per_tray + local_rank
        is_one_machine = self.boot.fleet.cluster.kind == "local"  # all trays see the same devices
        return RankContext(
            rank=rank,
            world_size=topology.world_size,
            tray=self.tray,
            num_trays=topology.num_trays,
            local_rank=local_rank,
            device=device if device == "cpu" else f"{device}:{rank if is_one_machine else local_rank}",
            bind_host=self.boot.bind_host,
        )
