"""Packed weights against a float64 reading of their bits that shares no line with ours: every code, extreme scales."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import quantize
import torch

from pegahpc.kernels.formats import Packed, is_finite, unpack
from pegahpc.kernels.weight_format import INT4_GROUP, MXFP4, WeightFormat, fp8_block

BLOCK = (128, 128)
SMALL_FP8 = fp8_block(16, 32)


def e4m3(code: int) -> float:
    """Sign, four bits of exponent (bias 7), three of fraction; 0 is subnormal; all ones is no number."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10))


def e2m1(code: int) -> float:
    """Sign, two bits of exponent (bias 1), one of fraction."""
    sign, exponent, fraction = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else math.ldexp(2 + fraction, exponent - 2))


def e8m0(code: int) -> float:
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


def as_float32(values: list[list[float]]) -> npt.NDArray[np.float32]:
    """Rounded once, from float64; beyond the largest it is infinite."""
    with np.errstate(over="ignore"):
        return np.array(values, dtype=np.float64).astype(np.float32)


def assert_same_bits(got: torch.Tensor, want: npt.NDArray[np.float32]) -> None:
    """Signs of zeros included; any NaN is a NaN."""
    assert got.dtype == torch.float32 and got.shape == want.shape
    numbers = ~np.isnan(want)
    assert np.array_equal(np.isnan(got.numpy()), np.isnan(want))
    assert np.array_equal(got.numpy()[numbers].view(np.int32), want[numbers].view(np.int32))


def fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> Packed:
    return Packed(format=fp8_block(*block), codes=codes.view(torch.float8_e4m3fn), scales=scales)


def int4(words: torch.Tensor, scales: torch.Tensor) -> Packed:
    return Packed(format=INT4_GROUP, codes=words, scales=scales)


def mx(codes: torch.Tensor, scales: torch.Tensor) -> Packed:
    return Packed(format=MXFP4, codes=codes, scales=scales)


FLOAT32_SCALES = [1.0, -1.0, 0.0, 2.0**-149, 2.0**-126, 1 / 448, 0.1, 3.0e38, 7.3e35]
BFLOAT16_SCALES = [1.0, -1.0, 0.0, 2.0**-133, 2.0**-126, 0.1015625, 3.38e38, 1.0e37]


@pytest.mark.parametrize("scale", FLOAT32_SCALES)
def test_every_code_of_e4m3_reads_as_its_bits_say(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    got = unpack(fp8(codes, torch.tensor([[scale]])))
    held = float(np.float32(scale))
    assert_same_bits(got, as_float32([[e4m3(int(code)) * held for code in row] for row in codes]))


@pytest.mark.parametrize("scale", BFLOAT16_SCALES)
def test_every_code_of_int4_reads_as_its_bits_say_in_every_place_of_a_word(scale: float) -> None:
    columns = [[(column * 3 + row) % 16 for column in range(32)] for row in range(16)]  # all codes at all places
    words = [[sum(code << 4 * j for j, code in enumerate(row[8 * i : 8 * i + 8])) for i in range(4)] for row in columns]
    packed = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    scales = torch.full((16, 1), scale, dtype=torch.bfloat16)
    want = as_float32([[(code - 8) * float(scales[0, 0]) for code in row] for row in columns])
    assert_same_bits(unpack(int4(packed, scales)), want)
    for j in range(8):
        assert {row[j] for row in columns} == set(range(16))


def test_every_code_of_mxfp4_under_every_scale_reads_as_its_bits_say() -> None:
    columns = [(column * 3) % 16 for column in range(16)] + [(column * 3 + 1) % 16 for column in range(16)]
    assert set(columns[0::2]) == set(columns[1::2]) == set(range(16))
    row = [low | high << 4 for low, high in zip(columns[0::2], columns[1::2], strict=True)]
    packed = torch.tensor([row] * 256, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    want = as_float32([[e2m1(code) * e8m0(scale) for code in columns] for scale in range(256)])
    assert_same_bits(unpack(mx(packed, scales)), want)


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 200), (576, 130), (129, 384)])
@pytest.mark.parametrize("block", [(128, 128), (16, 32)])
def test_each_block_of_fp8_has_its_own_scale_also_where_it_is_cut_off(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), generator=generator)
    got = unpack(fp8(codes, scales, block))
    want = as_float32(
        [[e4m3(int(code)) * float(scales[o // block[0], i // block[1]]) for i, code in enumerate(row)]
         for o, row in enumerate(codes)]
    )  # fmt: skip
    assert_same_bits(got, want)


FORMATS = [SMALL_FP8, INT4_GROUP, MXFP4]
each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def random_packed(format: WeightFormat) -> Packed:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(3))
    if format == SMALL_FP8:
        return fp8(*quantize.fp8_block(weight, format.block), format.block)
    return int4(*quantize.int4_group(weight)) if format == INT4_GROUP else mx(*quantize.mxfp4(weight))


@each_format
def test_a_stack_and_a_range_of_rows_read_as_the_matrices_do(format: WeightFormat) -> None:
    one, two = random_packed(format), random_packed(format)
    two.codes.view(torch.uint8).copy_(two.codes.view(torch.uint8).flip(0))
    stack = Packed(format=format, codes=torch.stack((one.codes.view(torch.uint8), two.codes.view(torch.uint8))).view(
        one.codes.dtype), scales=torch.stack((one.scales, two.scales)))  # fmt: skip
    assert torch.equal(unpack(stack), torch.stack((unpack(one), unpack(two))))
    assert torch.equal(unpack(stack[1]), unpack(two))
    rows = format.block[0] * 2
    part = Packed(format=format, codes=one.codes[rows:], scales=one.scales[2:])
    assert torch.equal(unpack(part), unpack(one)[rows:])


@pytest.mark.parametrize(("format", "relative"), [(SMALL_FP8, 2**-4), (INT4_GROUP, 0.51 / 7), (MXFP4, 0.26)])
def test_what_is_written_reads_back_within_half_a_step_of_the_format(format: WeightFormat, relative: float) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(3))
    got = unpack(random_packed(format))
    bound = weight.abs() * relative if format == SMALL_FP8 else weight.view(48, 3, 32).abs().amax(-1, keepdim=True)
    worst = (got - weight).abs() if format == SMALL_FP8 else (got - weight).abs().view(48, 3, 32) / relative
    assert bool((worst <= bound + 1e-6).all())


@each_format
def test_a_swapped_nibble_or_block_does_not_read_back(format: WeightFormat) -> None:
    """The control of the test above: the bound sees the faults that a layout invites."""
    packed = random_packed(format)
    if format == SMALL_FP8:
        wrong = Packed(format=format, codes=packed.codes, scales=packed.scales.flip(1))
    else:
        bits = packed.codes.contiguous().view(torch.uint8)
        swapped = (bits >> 4 | bits << 4).view(packed.codes.dtype)
        wrong = Packed(format=format, codes=swapped, scales=packed.scales)
    assert float((unpack(wrong) - unpack(packed)).abs().max()) > 0.05


@each_format
def test_nothing_reads_as_nothing(format: WeightFormat) -> None:
    packed = random_packed(format)
    empty = Packed(format=format, codes=packed.codes[:0], scales=packed.scales[:0])
    assert unpack(empty).shape == (0, 96) and is_finite(empty)


def test_every_code_of_e4m3_is_finite_unless_its_bits_are_no_number() -> None:
    codes = torch.zeros(3, 5, dtype=torch.uint8)
    for code in range(256):
        codes[2, 4] = code
        assert is_finite(fp8(codes, torch.ones(1, 1))) is not math.isnan(e4m3(code))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_found(scale: float) -> None:
    assert not is_finite(fp8(torch.zeros(2, 2, dtype=torch.uint8), torch.tensor([[scale]])))
    assert not is_finite(int4(torch.zeros(1, 4, dtype=torch.int32), torch.tensor([[scale]], dtype=torch.bfloat16)))


def test_a_scale_of_mxfp4_that_is_no_number_is_found() -> None:
    scales = torch.zeros(2, 2, dtype=torch.uint8)
    assert is_finite(mx(torch.zeros(2, 32, dtype=torch.uint8), scales))
    scales[1, 1] = 255
    assert not is_finite(mx(torch.zeros(2, 32, dtype=torch.uint8), scales))


@pytest.mark.parametrize(("code", "scale", "finite"), [(7, 252, True), (7, 253, False), (1, 254, True), (6, 253, False),
                                                       (5, 253, True)])  # fmt: skip
def test_a_value_beyond_float32_is_found_where_it_is_and_only_there(code: int, scale: int, finite: bool) -> None:
    """6 * 2^125 is below 2^128, 6 * 2^126 is not; 3 * 2^126 and 0.5 * 2^127 are."""
    packed = mx(torch.full((1, 16), code | code << 4, dtype=torch.uint8), torch.full((1, 1), scale, dtype=torch.uint8))
    assert is_finite(packed) is finite
    assert bool(unpack(packed).isfinite().all()) is finite
