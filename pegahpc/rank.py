"""Who a process is: the frozen context that the tray process gives each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One expert-parallel rank = one device = one rank process.

    Ranks are numbered tray by tray: rank = tray * ranks_per_tray + local_rank.
    """

    rank: int
    world_size: int
    tray: int
    num_trays: int
    local_rank: int
    device: str  # "cpu" or "cuda:N"
    bind_host: str  # the address that this rank's sockets bind and publish

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")

    @property
    def ranks_per_tray(self) -> int:
        """Ranks on each tray; trays are alike."""
        return self.world_size // self.num_trays
