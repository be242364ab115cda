"""A small V3 checkpoint as a mapping of tensors, and writers of every layout that we read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from oracles import save_tiny
from safetensors.torch import load_file
from tensor_files import Checkpoint


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it: several shards, an index, one tensor an expert."""
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "v3", "v3-groups")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Checkpoint:
    """The same, to be changed and written again."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(original.glob("*.safetensors")):
        tensors |= load_file(file)
    return Checkpoint(tmp_path, json.loads((original / "config.json").read_text()), tensors)
