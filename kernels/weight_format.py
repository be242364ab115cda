"""How a checkpoint packs a matrix: names, shapes and types of its tensors. No torch; `formats.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

PLAIN = ("BF16", "F32", "F16")  # safetensors' names; a plain matrix or vector may be any of them


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a matrix `base`: it lies in the checkpoint as base + suffix."""

    suffix: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # safetensors' names that are read; the first is the usual one


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A packed format: codes, and a scale for each block of (rows, columns)."""

    name: str
    block: tuple[int, int]
    codes: str  # suffix of the codes' name
    codes_dtype: str
    codes_an_item: int  # along the inputs
    scales: str
    scales_dtypes: tuple[str, ...]
    largest: float  # magnitude of a code

    @cache  # noqa: B019 (there are a few formats, which live as long as the process)
    def stored(self, num_out: int, num_in: int) -> tuple[StoredTensor, StoredTensor]:
        """Codes and scales of a matrix [num_out, num_in].

        Raises:
            ValueError: the inputs are no whole number of groups, where the format has no partial ones.
        """
        rows, columns = self.block
        if self.codes_an_item > 1 and num_in % columns:
            raise ValueError(f"{self.name}: {num_in} inputs are no multiple of its groups of {columns}")
        shape = (-(-num_out // rows), -(-num_in // columns))
        return (
            StoredTensor(suffix=self.codes, shape=(num_out, num_in // self.codes_an_item), dtypes=(self.codes_dtype,)),
            StoredTensor(suffix=self.scales, shape=shape, dtypes=self.scales_dtypes),
        )


def fp8_block(rows: int, columns: int) -> WeightFormat:
    """E4M3 codes [out, in]; float32 scales, one a block, also of those that the edges cut off.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3; a value is code * weight_scale_inv.
    """
    return WeightFormat(
        name="fp8_block",
        block=(rows, columns),
        codes=".weight",
        codes_dtype="F8_E4M3",
        codes_an_item=1,
        scales=".weight_scale_inv",
        scales_dtypes=("F32",),
        largest=448.0,
    )


# int32 [out, in / 8]: code j of a word in bits 4j to 4j + 3, value + 8; a scale for 32 inputs.
# Source: compressed-tensors, "pack-quantized".
INT4_GROUP = WeightFormat(
    name="int4_group",
    block=(1, 32),
    codes=".weight_packed",
    codes_dtype="I32",
    codes_an_item=8,
    scales=".weight_scale",
    scales_dtypes=PLAIN,
    largest=8.0,
)

# uint8 [out, in / 2]: E2M1, the low nibble first; a scale for 32 inputs, E8M0: 2^(scale - 127).
# Source: OCP Microscaling Formats v1.0, section 5; compressed-tensors, "mxfp4-pack-quantized".
MXFP4 = WeightFormat(
    name="mxfp4",
    block=(1, 32),
    codes=".weight_packed",
    codes_dtype="U8",
    codes_an_item=2,
    scales=".weight_scale",
    scales_dtypes=("U8", "F8_E8M0"),
    largest=6.0,
)
