"""How a line routes, without torch: what a plan needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCORINGS = ("softmax", "sigmoid")
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """How a line routes; field values are the checkpoint's.

    Raises:
        ValueError: a scoring or method that is not known, or counts that do not fit each other.
    """

    num_experts: int
    num_topk: int
    scoring: str  # scoring_func: "softmax" or "sigmoid"
    method: str  # topk_method: "greedy", "group_limited_greedy" (best expert a group) or "noaux_tc" (best two, biased)
    num_groups: int = 1
    num_topk_groups: int = 1
    norm_topk_prob: bool = False
    scale: float = 1.0  # routed_scaling_factor

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS or self.method not in METHODS:
            raise ValueError(f"router: scoring {self.scoring!r} with method {self.method!r} is not known")
        for name in ("num_experts", "num_topk", "num_groups", "num_topk_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"router: {name} is {getattr(self, name)}, below 1")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts {self.num_experts} is not a multiple of num_groups {self.num_groups}")
        held = self.num_topk_groups * (self.num_experts // self.num_groups)
        if self.num_topk_groups > self.num_groups:
            raise ValueError(f"num_topk_groups {self.num_topk_groups} is above num_groups {self.num_groups}")
        if held < self.num_topk:
            raise ValueError(
                f"{self.num_topk_groups} groups of {self.num_experts // self.num_groups} hold fewer than"
                f" {self.num_topk} experts"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the op `route_tokens`."""
        return {
            "scoring": self.scoring,
            "num_topk": self.num_topk,
            "num_groups": self.num_groups,
            "num_topk_groups": self.num_topk_groups,
            "group_best": 2 if self.method == "noaux_tc" else 1,
            "norm_topk_prob": self.norm_topk_prob,
            "scale": self.scale,
        }
