"""How a line routes, without torch: what a plan needs to know."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid")
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """How a line routes; field values are the checkpoint's.

    Raises:
        ValueError: a scoring or method that is not known, or groups that cannot hold num_topk experts.
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
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts {self.num_experts} is not a multiple of num_groups {self.num_groups}")
        held = self.num_topk_groups * (self.num_experts // self.num_groups)
        if held < self.num_topk:
            raise ValueError(
                f"{self.num_topk_groups} groups of {self.num_experts // self.num_groups} hold fewer than"
                f" {self.num_topk} experts"
            )
