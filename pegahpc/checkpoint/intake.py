"""Weights before they are read: tensors of their final shape, and for each stored matrix the place that it goes to.

Everything is allocated first and filled afterwards, in one pass over the disk, from chunk buffers straight into place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm

import torch

from pegahpc.checkpoint.files import CheckpointError, TensorInfo
from pegahpc.checkpoint.reading import DTYPES, Group, Job, Put, Source, read_all
from pegahpc.kernels.formats import Packed, is_finite, unpack
from pegahpc.kernels.weight_format import WeightFormat

BAND_ROWS = 64  # a transposition runs two to three times as fast in bands that stay in the cache (Xeon, 2026-12-01)
Place = Callable[[int, torch.Tensor], None]  # the first row, and rows of a matrix in their final type


class Intake:
    """The tensors of one rank: `new` and the methods after it allocate them, `fill` reads them all."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        format: WeightFormat | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.tensors = tensors
        self._format = format
        self._device = device
        self._dtype = dtype
        self._jobs: list[Job] = []
        self._group = Group(lambda: None)

    def fill(self, progress: Callable[[float], None]) -> None:
        """Read everything that was asked for.

        Raises:
            CheckpointError: a file that cannot be read, or weights that are not finite.
        """
        self._group = Group(lambda: None)  # the last one holds what will hold the weights, and that holds this
        read_all(self._jobs, progress)

    def begin(self, then: Callable[[], None]) -> None:
        """What is asked for from here on belongs together: `then` is called, in a reading thread, when all is there."""
        self._group = Group(then)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor without content, in the engine's type or this one."""
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def packed_format(self, name: str) -> WeightFormat | None:
        """The format that the matrix `name` (which ends in `.weight`) is packed in; None: it is plain."""
        format = self._format
        is_packed = format is not None and name.removesuffix(".weight") + format.scales in self.tensors
        return format if is_packed else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the matrix or vector, unpacked."""
        if (format := self.packed_format(name)) is None:
            return self.tensors[name].shape
        rows, items = self.tensors[name.removesuffix(".weight") + format.codes].shape
        return rows, items * format.codes_an_item

    def vector(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in its stored shape."""
        tensor = self.new(*self.shape(name), dtype=dtype)
        self.read(name, into(tensor), dtype=dtype)
        return tensor

    def transposed(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[out, in] matrices joined along out, stored [in, out] as the row products want them."""
        matrix = self.new(self.shape(names[0])[1], sum(self.shape(name)[0] for name in names), dtype=dtype)
        self.read_joined(names, matrix, dtype=dtype)
        return matrix

    def read_joined(self, names: tuple[str, ...], matrix: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """[out, in] matrices side by side into one that is allocated, [in, sum of outs]."""
        parts = torch.split(matrix, [self.shape(name)[0] for name in names], dim=1)
        for name, part in zip(names, parts, strict=True):
            self.read(name, into(part.t()), dtype=dtype)

    def read(
        self,
        name: str,
        place: Place,
        *,
        rows: range | None = None,
        granularity: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Have a matrix or vector read, unpacked if it is packed, and its rows handed to `place`, a chunk at a time.

        Args:
            rows: of the first dimension only these; `place` counts from the first of them. Plain tensors only.
            granularity: chunks start at multiples of so many rows.
        """
        final = dtype or self._dtype
        if (format := self.packed_format(name)) is None:
            source = self._source(name, rows)

            def put(first_row: int, tensors: list[torch.Tensor]) -> None:
                place(first_row, _finite(source, tensors[0].to(self._device).to(final)))

            self._add((source,), put, granularity=granularity)
            return
        codes, scales = self._packed_sources(name, format)

        def put_unpacked(first_row: int, tensors: list[torch.Tensor]) -> None:
            packed = self._checked(Packed(format=format, codes=tensors[0], scales=tensors[1]), codes, scales)
            place(first_row, unpack(packed).to(final))

        self._add((codes, scales), put_unpacked, rows_a_scale=format.block[0], granularity=granularity)

    def new_packed(self, num_matrices: int, *names: str) -> list[Packed]:
        """Stacks for matrices like these, without content and as they are stored, one below the other in one tensor."""
        format = self.packed_format(names[0])
        assert format is not None
        infos = [[source.info for source in self._packed_sources(name, format)] for name in names]
        stacks: list[tuple[torch.Tensor, ...]] = []
        for parts in zip(*infos, strict=True):
            heights = [info.shape[0] for info in parts]
            stack = self.new(num_matrices, sum(heights), *parts[0].shape[1:], dtype=DTYPES[parts[0].dtype])
            stacks.append(torch.split(stack, heights, dim=1))
        return [Packed(format=format, codes=codes, scales=scales) for codes, scales in zip(*stacks, strict=True)]

    def read_packed(self, name: str, matrix: Packed) -> None:
        """Have a packed matrix read as it is."""
        codes, scales = self._packed_sources(name, matrix.format)

        def put(first_row: int, tensors: list[torch.Tensor]) -> None:
            self._checked(Packed(format=matrix.format, codes=tensors[0], scales=tensors[1]), codes, scales)
            into(matrix.codes)(first_row, tensors[0])
            into(matrix.scales)(first_row // matrix.format.block[0], tensors[1])

        self._add((codes, scales), put, rows_a_scale=matrix.format.block[0])

    def _add(self, sources: tuple[Source, ...], put: Put, *, rows_a_scale: int = 1, granularity: int = 1) -> None:
        self._jobs.append(
            Job(
                sources=sources,
                put=put,
                group=self._group,
                rows_a_scale=rows_a_scale,
                granularity=lcm(rows_a_scale, granularity),
            )
        )

    def _source(self, name: str, rows: range | None = None) -> Source:
        info = self.tensors[name]
        rows = range(info.shape[0]) if rows is None else rows
        return Source(name=name, info=info, first_row=rows.start, num_rows=len(rows))

    def _packed_sources(self, name: str, format: WeightFormat) -> tuple[Source, Source]:
        base = name.removesuffix(".weight")
        return self._source(base + format.codes), self._source(base + format.scales)

    def _checked(self, packed: Packed, codes: Source, scales: Source) -> Packed:
        """On the engine's device, if all that it reads as is finite."""
        packed = Packed(
            format=packed.format, codes=packed.codes.to(self._device), scales=packed.scales.to(self._device)
        )
        if not is_finite(packed):
            is_scales_fault = packed.scales.dtype.is_floating_point and not packed.scales.isfinite().all()
            raise _not_finite(scales if is_scales_fault else codes)
        return packed


def into(tensor: torch.Tensor) -> Place:
    """Rows go where the tensor has them; a view may have them anywhere in memory."""

    def place(first_row: int, rows: torch.Tensor) -> None:
        target = tensor[first_row : first_row + rows.shape[0]]
        bands = rows.shape[0] if target.is_contiguous() else BAND_ROWS
        for to, band in zip(torch.split(target, bands), torch.split(rows, bands), strict=True):
            to.copy_(band)

    return place


def _finite(source: Source, rows: torch.Tensor) -> torch.Tensor:
    """The rows, if all are finite: then the least and the greatest are, and NaN would be both."""
    if rows.numel() and not torch.stack(torch.aminmax(rows)).isfinite().all():
        raise _not_finite(source)
    return rows


def _not_finite(source: Source) -> CheckpointError:
    return CheckpointError(f"{source.name}: holds values that are not finite ({source.info.file.name})")
