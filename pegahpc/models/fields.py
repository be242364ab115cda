"""Reading a checkpoint's config.json with nothing left unread: pinned, taken, inert, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T", int, float, str, bool)

# Fields that change nothing about inference, in any line.
INERT = frozenset(
    {
        "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype",
        "eos_token_id", "ep_size", "id2label", "initializer_range", "label2id", "model_type", "num_key_value_heads",
        "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef", "seq_aux", "torch_dtype",
        "transformers_version", "use_cache",
    }
)  # fmt: skip


class UnsupportedModel(ValueError):
    """A config.json that no line can serve. The message names the field and what would be right."""


class Fields:
    """A config.json as a line reads it: each field is asked for once, and `finish` refuses what nobody asked for."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._left = {name: value for name, value in config.items() if name not in INERT}
        self._where = where

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field's value; `default` when it is absent or null.

        Raises:
            UnsupportedModel: absent without a default, of another type, or a negative count.
        """
        value = self._left.pop(name, None)
        if value is None:
            value = default
        if value is None:
            raise self.refusal(f"{name} is missing")
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise self.refusal(f"{name} is {value!r}, not of type {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refusal(f"{name} is {value}, not a finite number")
        if isinstance(value, int) and value < 0:
            raise self.refusal(f"{name} is {value}, below 0")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        """Like `take`, with None for absent or null."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return self.take(name, kind)

    def items(self, name: str, kind: type[T]) -> tuple[T, ...] | None:
        """A field that is a list of one type; None when absent or null."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
            raise self.refusal(f"{name} is {value!r}, not a list of type {kind.__name__}")
        return tuple(value)

    def pin(self, name: str, only: Any) -> None:
        """The field may be absent, null, or exactly `only`: anything else is another structure."""
        value = self._left.pop(name, None)
        if value is not None and value != only:
            raise self.refusal(f"{name} is {value!r}; this line serves {only!r} only")

    def inert(self, *names: str) -> None:
        """Fields of this line that change nothing here."""
        for name in names:
            self._left.pop(name, None)

    def nested(self, name: str) -> Fields | None:
        """A field that is a mapping itself; None when absent or null."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(f"{name} is {value!r}, not a mapping")
        return Fields(value, f"{self._where}: {name}")

    def refusal(self, what: str) -> UnsupportedModel:
        """An error that says where the field stands."""
        return UnsupportedModel(f"{self._where}: {what}")

    def finish(self) -> None:
        """Refuse fields that this line does not know: they may change what the model computes."""
        if self._left:
            unknown = ", ".join(f"{name}={value!r}" for name, value in sorted(self._left.items()))
            raise self.refusal(f"fields that this line does not know: {unknown}")
