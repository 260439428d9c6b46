"""`gemm` on float32: rounding to TF32, its reference, the emulated kernels, what is refused without consent."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import Sm80GemmConfig, Sm90GemmConfig, Sm100GemmConfig, gemm, round_tf32
from cute_kernels.config import GemmProblem
from cute_kernels.operations import reference
from cute_kernels.plan import make_plan
from cute_kernels.plan.gemm_sm100 import LEVEL_7, LEVEL_8, ONE_ACCUMULATOR, WIDE
from tests.emulator.exact_sums import emulate
from tests.emulator.gemm_inputs import make_gemm_case
from tests.nightly import NIGHTLY, by_day, nightly
from tests.operations.reference.exact import fp32, fractions, nearest

FP32, BF16 = torch.float32, torch.bfloat16
TF32 = (11, -136)
"""Significant bits, and the exponent of the least unit: FP32's exponents, 10 fraction bits."""

SMALL_SM80 = Sm80GemmConfig(64, 64)
SMALL_SM90 = Sm90GemmConfig(128, 64, stages=2, cluster_m=1, store_stages=1)
CONFIGS = {
    "level 8": LEVEL_8,
    "level 7": LEVEL_7,
    "256 x 256": WIDE,
    "512 x 256, one accumulator": ONE_ACCUMULATOR,
    "two pairs": dataclasses.replace(LEVEL_8, stages=3, cluster_m=4),
    "sm90": SMALL_SM90,
    "sm90, pingpong in a cluster": Sm90GemmConfig(64, 128, 3, 2, 1, pingpong=True),
    "sm90, split": dataclasses.replace(SMALL_SM90, split_k=2),
}


def draw(*shapes: tuple[int, ...], seed: int = 0, spread: int = 0) -> list[torch.Tensor]:
    """Random FP32 with all 24 significant bits, scaled by up to 2 ** spread either way."""
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.randint(-spread, spread + 1, shape, generator=generator) for shape in shapes]
    return [torch.ldexp(torch.randn(shape, generator=generator), s) for shape, s in zip(shapes, scales)]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_rounding_is_to_nearest_ties_to_even(values):
    values = torch.tensor([v for v in values if abs(v) < 2.0**127] or [0.0])
    assert fractions(reference.round_tf32(values)) == [nearest(v, *TF32) for v in fractions(values)]


def test_rounding_of_ties_ends_and_specials():
    unit = 2.0**-10
    exact = torch.tensor([1 + unit / 2, 1 + 1.5 * unit, 1 + unit / 2 + 2.0**-23, -(1 + unit / 2), 2.0**-137, 0.0, -0.0])
    expected = torch.tensor([1, 1 + 2 * unit, 1 + unit, -1, 0, 0, -0.0])
    rounded = reference.round_tf32(exact)
    assert torch.equal(rounded, expected) and torch.equal(rounded.signbit(), exact.signbit())
    largest = torch.finfo(FP32).max
    special = reference.round_tf32(torch.tensor([largest, -largest, math.inf, -math.inf, math.nan]))
    assert special[:4].tolist() == [math.inf, -math.inf, math.inf, -math.inf] and special[4].isnan()


@given(
    seed=st.integers(0, 2**32),
    k=st.sampled_from([4, 8, 12, 44]),
    spread=st.sampled_from([0, 12]),
    out_dtype=st.sampled_from([FP32, BF16]),
)
def test_reference_is_the_contract(seed, k, spread, out_dtype):
    """Operands rounded, one FP32 rounding per 8 elements of K, one of the bias, one to the output."""
    a, b, bias = draw((3, k), (4, k), (4,), seed=seed, spread=spread)
    out = gemm(a, b, bias=bias, out_dtype=out_dtype, allow_tf32=True)
    assert out.dtype == out_dtype
    rows, columns = ([[nearest(v, *TF32) for v in row] for row in fractions(x)] for x in (a, b))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            acc = fp32(0 * row[0])
            for start in range(0, k, 8):
                terms = zip(row[start : start + 8], column[start : start + 8], strict=True)
                acc = fp32(acc + sum(x * y for x, y in terms))
            result = fp32(acc + fractions(bias)[j])
            assert fractions(out)[i][j] == (result if out_dtype is FP32 else nearest(result, 8, -133))


@pytest.mark.parametrize("name", by_day(CONFIGS, ("level 8", "sm90, split")))
def test_emulated_kernels_equal_the_reference(name):
    """K blocks of 32 elements, the last one partial; two rows of tiles; odd N; a batch; a slice off 16 bytes."""
    config = CONFIGS[name]
    a, b, bias = draw((2, 150, 108), (2, 41, 108), (41,), seed=len(name))
    off = torch.empty(a.numel() + 1)[1:].view(a.shape).copy_(a)
    assert off.data_ptr() % 16
    both = name == "level 8" or NIGHTLY
    for out_dtype in (FP32, BF16) if both else (BF16,):
        out = gemm(off, b, bias=bias, out_dtype=out_dtype, config=config, backend="emulator", allow_tf32=True)
        assert torch.equal(out, reference.gemm(a, b, bias, out_dtype, getattr(config, "split_k", 1)))


@pytest.mark.parametrize("config", [LEVEL_8, SMALL_SM90], ids=["sm100", "sm90"])
def test_a_product_with_the_identity_shows_the_rounding(config):
    """TMA rounds: dropping the low bits, as the tensor core alone would, changes about half of these values."""
    (a,) = draw((130, 64), spread=40)
    out = gemm(a, torch.eye(64), config=config, backend="emulator", allow_tf32=True)
    truncated = (a.view(torch.int32) >> 13 << 13).view(FP32)
    assert torch.equal(out, reference.round_tf32(a))
    assert 0.3 < (out != truncated).float().mean() < 0.7


def rms_of_a_product() -> float:
    """Root mean square of the error of one product of two standard normal numbers that were rounded to TF32.

    In ``[2^e, 2^(e + 1))`` TF32 has units of ``2^(e - 10)``, so rounding leaves an error of mean square
    ``4^(e - 10) / 12`` in either operand, which the other one, of mean square 1, multiplies; both signs are equally
    likely.
    """

    def below(x: float) -> float:
        return math.erf(x / math.sqrt(2))

    squares = sum((below(2.0 ** (e + 1)) - below(2.0**e)) * 4.0 ** (e - 10) / 12 for e in range(-30, 4))
    return math.sqrt(2 * squares)


@pytest.mark.parametrize("config", [LEVEL_8, SMALL_SM90, SMALL_SM80], ids=["sm100", "sm90", "sm80"])
@pytest.mark.parametrize(
    "m, n, k",
    [
        (128, 128, 128), (256, 256, 256), pytest.param(512, 512, 512, marks=nightly),
        pytest.param(128, 128, 1024, marks=nightly), (128, 128, 2048),
    ],
)  # fmt: skip
def test_error_against_fp64_is_that_of_tf32(m, n, k, config):
    """Signed operands, the emulated kernels, the sizes that docs/experiments.md names (of the largest two a strip).

    With ``u = 2^-11`` (rounding of an operand) and ``v = 2^-24`` (one FP32 rounding per 8 elements of K) no error
    exceeds ``((1 + u)^2 (1 + v)^(K / 8) - 1) sum |a| |b|``. Independent rounding errors add up to `rms_of_a_product`
    times the square root of K, within what a sample of 16,384 results or more leaves open. Truncation gives 2.6 times
    that.
    """
    a, b = draw((m, k), (n, k), seed=k)
    out = gemm(a, b, config=config, backend="emulator", allow_tf32=True)
    error = out.double() - a.double() @ b.double().T
    limit = (1 + 2.0**-11) ** 2 * (1 + 2.0**-24) ** (k / 8) - 1
    assert bool((error.abs() <= limit * (a.double().abs() @ b.double().abs().T)).all())
    assert float(error.square().mean().sqrt()) == pytest.approx(rms_of_a_product() * math.sqrt(k), rel=0.04)
    assert float(error.abs().max()) < 6 * rms_of_a_product() * math.sqrt(k)


@pytest.mark.parametrize("k", [128, 1024, 8192])
def test_truncation_gives_errors_of_two_and_a_half_roundings(k: int) -> None:
    """Signed operands, relative to the results' root mean square: 2.9e-4 when rounded, 7.7e-4 when cut, at every K.

    Relative to a single result there is no bound, since some are nearly 0; absolute errors grow as the root of K.
    """
    a, b = draw((128, k), (128, k), seed=k)
    exact = a.double() @ b.double().T
    cut = [(t.view(torch.int32) & ~0x1FFF).view(FP32) for t in (a, b)]
    rounded = [reference.round_tf32(t) for t in (a, b)]
    for (x, y), expected in ((rounded, 2.9e-4), (cut, 7.7e-4)):
        error = x.double() @ y.double().T - exact
        assert float(error.square().mean().sqrt() / exact.square().mean().sqrt()) == pytest.approx(expected, rel=0.06)
        assert float(error.abs().max()) < 5e-3 * math.sqrt(k)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_weight_that_is_rounded_once_gives_the_same_bits(arch: str) -> None:
    """By every kernel, with ties, ends of the range and NaN among its numbers, whether or not it is rounded again."""
    a, b = draw((40, 44), (24, 44), seed=9, spread=30)
    unit, largest = 2.0**-10, torch.finfo(FP32).max
    b[0, :6] = torch.tensor([1 + unit / 2, 1 + 1.5 * unit, -(1 + unit / 2), 2.0**-140, 0.0, -0.0])
    b[1, 0], b[2, 0], b[3, 0], a[:, 0] = largest, math.inf, math.nan, 1.0
    once = round_tf32(b)
    assert torch.equal(round_tf32(once).view(torch.int32), once.view(torch.int32)) and not torch.equal(once, b)

    def product(weight: torch.Tensor, rounding: str) -> torch.Tensor:
        config = dataclasses.replace(SMALL_SM80, rounding=rounding)
        case = make_gemm_case(m=40, n=24, k=44, in_dtype=FP32, out_dtype=FP32, bias=False, config=config, arch=arch)
        tensors = case.tensors.replace(a=a[None], b=weight[None])
        emulate(case.plan, tensors)
        return tensors.out[0, :, :24].view(torch.int32)

    expected = product(b, "nearest")
    assert torch.equal(product(once, "nearest"), expected) and torch.equal(product(once, "nearest_a"), expected)
    assert not torch.equal(product(b, "nearest_a"), expected)
    assert torch.equal(gemm(a, once, allow_tf32=True).isnan(), gemm(a, b, allow_tf32=True).isnan())


def test_what_is_rounded_is_float32() -> None:
    with pytest.raises(TypeError, match=r"values has dtype torch.bfloat16: must be torch.float32"):
        round_tf32(torch.zeros(4, dtype=BF16))
    weight = torch.nn.Parameter(torch.randn(8, 6).T)
    rounded = round_tf32(weight)
    assert rounded.is_contiguous() and not rounded.requires_grad and rounded.shape == (6, 8)


def test_plans_have_half_the_elements_of_k_in_a_stage():
    """The same bytes: shared memory, tensor memory and stages are those of 16-bit operands."""
    for config in CONFIGS.values():
        tf32, bf16 = (make_plan(GemmProblem(512, 512, 512, in_dtype=t), config) for t in ("float32", "bfloat16"))
        assert (tf32.tile_k, tf32.mma_k, tf32.k_blocks) == (32, 8, 16) and (bf16.tile_k, bf16.mma_k) == (64, 16)
        assert tf32.smem == bf16.smem and tf32.stage_bytes == bf16.stage_bytes


def test_the_sm90_chooser_knows_that_tf32_runs_at_half_the_rate():
    """Twice the elements of K in 16 bits take the time that these do: the choice is the same one."""
    for size in (512, 1024, 2048, 4096):
        tf32 = make_plan(GemmProblem(size, size, 1024, in_dtype="float32", out_dtype="bfloat16"), arch="sm_90a")
        bf16 = make_plan(GemmProblem(size, size, 2048), arch="sm_90a")
        assert tf32.config == bf16.config


def test_compiled_and_fake():
    a, b = draw((6, 20), (8, 20))
    expected = gemm(a, b, allow_tf32=True)
    assert torch.equal(torch.compile(lambda x: gemm(x, b, allow_tf32=True), backend="eager")(a), expected)
    scales_and_residual = (None,) * 7
    arguments = (a, b, None, *scales_and_residual, None, "auto", None, True)
    names = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.cute_kernels.gemm, arguments, test_utils=names)
    with FakeTensorMode():
        out = gemm(torch.empty(3, 10, 36), torch.empty(5, 36), allow_tf32=True)
        assert out.shape == (3, 10, 5) and out.dtype == FP32


def test_the_flag_changes_nothing_for_16_bit_operands():
    a, b = (x.to(BF16) for x in draw((5, 24), (6, 24)))
    assert torch.equal(gemm(a, b, allow_tf32=True), gemm(a, b))


A, B = torch.zeros(4, 16), torch.zeros(6, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"allow_tf32": False}, TypeError, r"a has dtype torch\.float32, .*TF32.*allow_tf32=True"),
        ({"allow_tf32": 1}, TypeError, "allow_tf32 is int: must be bool"),
        ({"allow_tf32": np.True_}, TypeError, "allow_tf32 is numpy.bool_?: must be bool"),
        ({"b": B.to(BF16)}, TypeError, "b has dtype torch.bfloat16 with a of torch.float32"),
        ({"a": A.double(), "b": B.double()}, TypeError, "a has dtype torch.float64: must be .*torch.float32"),
        ({"a": A[:, :6].contiguous(), "b": B[:, :6].contiguous()}, ValueError, "K = 6.*multiples of 4.*nearest 4 or 8"),
        ({"config": Sm100GemmConfig(stages=9), "backend": "emulator"}, ValueError, "stages = 9"),
    ],
)
def test_refusals_name_argument_given_and_allowed(arguments, error, message):
    arguments = {"a": A, "b": B, "allow_tf32": True} | arguments
    with pytest.raises(error, match=message):
        gemm(arguments.pop("a"), arguments.pop("b"), **arguments)
