"""A checkpoint in memory that a test changes and writes: one file, shards with an index, or fused experts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pegahpc.checkpoint.load import Placement, load_decoder
from pegahpc.kernels.registry import Place
from pegahpc.kernels.selected import MADE, select_kernels
from pegahpc.models.decoder import Decoder
from pegahpc.models.lines import probe, read_config
from pegahpc.models.spec import ModelSpec
from pegahpc.moe.dispatch import Dispatcher, LocalDispatcher

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass
class Checkpoint:
    """`config` and `tensors` are free to change before one of the writers is called."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def single(self) -> Path:
        """One model.safetensors."""
        self._write_config()
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, self._file("model.safetensors"))
        return self.folder

    def sharded(self, num_shards: int = 3) -> Path:
        """Shards named as transformers names them, and their index."""
        self._write_config()
        names = sorted(self.tensors)
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = names[shard::num_shards]
            save_file({name: self.tensors[name].contiguous() for name in part}, self._file(file))
            weight_map |= dict.fromkeys(part, file)
        self.write_index(weight_map)
        return self.folder

    def fuse_experts(self) -> None:
        """[E, 2I, H] and [E, H, I] stacks in place of each expert's three matrices."""
        found: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
        for name in list(self.tensors):
            if match := EXPERT.fullmatch(name):
                before, expert, part = match.groups()
                found.setdefault(before, {}).setdefault(part, {})[int(expert)] = self.tensors.pop(name)
        for before, parts in found.items():
            experts = range(len(parts["gate"]))
            both = [torch.cat((parts["gate"][e], parts["up"][e])) for e in experts]
            self.tensors[f"{before}.gate_up_proj"] = torch.stack(both)
            self.tensors[f"{before}.down_proj"] = torch.stack([parts["down"][e] for e in experts])

    def write_index(self, weight_map: dict[str, str]) -> None:
        """The index alone."""
        self._file("model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def _write_config(self) -> None:
        self._file("config.json").write_text(json.dumps(self.config))

    def _file(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name


class ShareOfExperts(LocalDispatcher):
    """Says which experts are this rank's; carries nothing."""

    def __init__(self, first_expert: int, num_local_experts: int) -> None:
        super().__init__(num_local_experts)
        self.first_expert = first_expert


def spec_of(folder: Path) -> ModelSpec:
    """What the folder's config.json says."""
    return probe(read_config(folder))


class Made(dict[str, Any]):
    """An op in place of a made one: only holds the weights that it was given."""


def load(
    folder: Path,
    dispatcher: Dispatcher | None = None,
    progress: list[float] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    packed_experts: bool = True,
    device: str = "cpu",
) -> Decoder:
    """The decoder of a rank, all experts by default; not to be run, but to be looked into by `weights_of`."""
    where = torch.device(device)
    placement = Placement(
        device=where,
        dtype=dtype,
        kernels=replace(select_kernels(Place(device=where, dtype=dtype), {}), **dict.fromkeys(MADE, Made)),
        dispatcher=dispatcher or LocalDispatcher(8),
        packed_experts=packed_experts,
    )
    shares: list[float] = [] if progress is None else progress
    return load_decoder(folder, spec_of(folder), placement, shares.append)


def weights_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Every tensor that a decoder holds, by where it stands."""
    found = {"embed": decoder.embed_VH, "final_norm": decoder.final_norm_H, "head": decoder._head["w_IO"]}
    for number, layer in enumerate(decoder.layers):
        found[f"{number}.input_norm"] = layer.input_norm_H
        found[f"{number}.post_attention_norm"] = layer.post_attention_norm_H
        for part, owner in (("attention", layer.attention), ("ffn", layer.ffn)):
            for op in vars(owner).values():
                weights = op.items() if isinstance(op, Made) else ()
                found |= {f"{number}.{part}.{name}": w for name, w in weights if isinstance(w, torch.Tensor)}
    return found
