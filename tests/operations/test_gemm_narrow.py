"""`gemm` of operands of 8 bits, with a residual, to FP8: its reference against exact arithmetic, what torch sees."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import Sm90GemmConfig, gemm
from cute_kernels.config import GemmProblem
from cute_kernels.operations.gemm import GEMM
from cute_kernels.plan import make_plan
from tests.operations.reference.exact import fp32, fractions, nearest

FP8, INT8, UINT8, BF16, FP32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bfloat16, torch.float32
SMALL_SM90 = Sm90GemmConfig(64, 128, stages=2, cluster_m=1, pingpong=True, store_stages=1)


def make_call(seed=0, m=5, n=7, k=48, dtype=FP8):
    """Random ``a``, ``b``, bias, multipliers of rows and columns, residual."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, kind):
        if kind.is_floating_point:
            return torch.randn(shape, generator=generator).to(kind)
        return torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, shape, generator=generator, dtype=kind)

    a, b = draw(m, k, kind=dtype), draw(n, k, kind=INT8 if dtype is UINT8 else dtype)
    rows, columns = torch.rand(m, 1, generator=generator), torch.rand(1, n, generator=generator)
    return a, b, draw(n, kind=FP32), rows, columns, draw(m, n, kind=BF16)


@given(
    seed=st.integers(0, 2**32),
    k=st.sampled_from([16, 48, 96]),
    dtype=st.sampled_from([FP8, INT8, UINT8]),
    out_dtype=st.sampled_from([BF16, FP32, FP8]),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    along=st.sampled_from(["", "row", "column", "row column"]),
)
def test_reference_is_the_contract(seed, k, dtype, out_dtype, with_bias, with_residual, along):
    """One product of the multipliers, one fused multiply-add, one sum with the residual, one rounding at the end."""
    a, b, bias, rows, columns, residual = make_call(seed, k=k, dtype=dtype)
    scale_a, scale_b = rows if "row" in along else 0.3, columns if "column" in along else torch.tensor([0.7])
    out_scale = 0.05 if out_dtype is FP8 else None
    out = gemm(
        a, b, bias=bias if with_bias else None, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype,
        residual=residual if with_residual else None, out_scale=out_scale,
    )  # fmt: skip
    factors = [
        fractions(torch.as_tensor(scale).reshape(shape).expand(out.shape))
        for scale, shape in ((scale_a, (-1, 1)), (scale_b, (1, -1)))
    ]
    inverse = 0 if out_scale is None else fp32(1 / fp32(Fraction(out_scale)))
    for i, (row, line) in enumerate(zip(fractions(a), fractions(out), strict=True)):
        for j, (column, value) in enumerate(zip(fractions(b), line, strict=True)):
            total, step = Fraction(0), 32 if dtype is FP8 else k
            for start in range(0, k, step):
                products = zip(row[start : start + step], column[start : start + step], strict=True)
                total = fp32(total + sum(x * y for x, y in products))
            scale = fp32(factors[0][i][j] * factors[1][i][j])
            total = fp32(total * scale + (fractions(bias)[j] if with_bias else 0))
            total = fp32(total + (fractions(residual)[i][j] if with_residual else 0))
            if out_dtype is FP8:
                total = max(min(fp32(total * inverse), Fraction(448)), Fraction(-448))
            assert value == nearest(total, *{BF16: (8, -133), FP32: (24, -149), FP8: (4, -9)}[out_dtype])


def test_emulated_kernel_equals_the_reference():
    """INT8, whose sums are exact on any device; N whose rows the kernel pads, a residual off 16 bytes, a batch."""
    calls = [make_call(seed, m=70, n=37, k=80, dtype=UINT8) for seed in range(2)]
    a, b, rows, columns, residual = (torch.stack([call[i] for call in calls]) for i in (0, 1, 3, 4, 5))
    off = torch.empty(residual.numel() + 1, dtype=BF16)[1:].view(residual.shape).copy_(residual)
    more = {"bias": calls[0][2], "scale_a": rows, "scale_b": columns, "residual": off}
    for out in ({}, {"out_dtype": FP8, "out_scale": 7.0}):
        emulated = gemm(a, b, **more, **out, config=SMALL_SM90, backend="emulator")
        assert emulated.is_contiguous() and torch.equal(emulated.view(UINT8), gemm(a, b, **more, **out).view(UINT8))
    flat = gemm(a, b[0], scale_a=rows.view(-1, 1), residual=residual)
    assert torch.equal(flat, gemm(a, b[0], scale_a=rows, residual=residual))
    assert torch.equal(flat[1], gemm(a[1], b[0], scale_a=rows[1], residual=residual[1]))


def test_one_tensor_may_be_several_arguments():
    """The operand as its own residual and as the other operand, a scale for everything; all stay as they are."""
    generator = torch.Generator().manual_seed(4)
    a = torch.randint(-4, 5, (64, 64), generator=generator).half()
    scale, before = torch.tensor([0.5]), a.clone()
    more = {"scale_a": scale, "scale_b": scale, "residual": a, "bias": a[0], "out_dtype": FP8, "out_scale": scale}
    out = gemm(a, a, **more, config=SMALL_SM90, backend="emulator")
    exactly = (a.double() @ a.double().T / 4 + a[0].double() + a.double()) * 2
    assert torch.equal(out.view(UINT8), exactly.clamp(-448, 448).float().to(FP8).view(UINT8))
    assert torch.equal(a, before) and scale.item() == 0.5


def test_an_output_of_8_bits_is_the_next_calls_operand():
    """Its ``out_scale`` is the next one's ``scale_a``."""
    a, b, bias, *_ = make_call(3, m=64, n=64, k=64)
    exactly = gemm(a, b, bias=bias, out_dtype=FP32)
    scale = exactly.abs().max().item() / 448
    narrow = gemm(a, b, bias=bias, out_dtype=FP8, out_scale=scale)
    torch.testing.assert_close(narrow.float() * scale, exactly, rtol=2**-4, atol=scale * 2**-9)
    one = torch.eye(64).to(FP8)
    torch.testing.assert_close(gemm(narrow, one, scale_a=scale, out_dtype=FP32), narrow.float() * scale)


def test_types_of_results():
    a, b, *_ = make_call(dtype=INT8)
    assert gemm(a, b).dtype is BF16
    for backend in ("auto", "emulator"):
        empty = {"scale_a": torch.ones(0, 1), "residual": torch.ones(0, 7), "bias": torch.ones(7).half()}
        out = gemm(a[:0], b, **empty, out_dtype=FP8, out_scale=torch.ones(1), backend=backend)
        assert (out.shape, out.dtype) == ((0, 7), FP8)
    with FakeTensorMode():
        a, b = torch.empty(4, 32, dtype=FP8), torch.empty(24, 32, dtype=FP8)
        out = gemm(a, b, scale_a=torch.empty(4, 1), residual=torch.empty(4, 24), out_dtype=FP8, out_scale=2.0)
        assert (out.shape, out.dtype) == ((4, 24), FP8)


@pytest.mark.parametrize("dtype", [FP8, UINT8])
def test_opcheck(dtype):
    a, b, bias, rows, columns, residual = make_call(dtype=dtype)
    names = ("test_faketensor", "test_aot_dispatch_dynamic")
    names += ("test_schema",) if dtype is UINT8 else ()  # which multiplies tensors of any type
    factor = torch.tensor([0.5])
    for scales in (
        (rows, columns, residual, factor, None, None, None, FP8), (None, None, None, None, 0.5, 2.0, None, None),
    ):  # fmt: skip
        call = (a, b, bias, *scales, "auto")
        torch.library.opcheck(torch.ops.cute_kernels.gemm, call, test_utils=names)


def test_compiled_function_has_one_node_and_the_same_result():
    a, b, bias, rows, columns, residual = make_call(n=8)
    seen = []

    def backend(module, _):
        seen.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    def call(a, rows, residual):
        return gemm(a, b, bias=bias, scale_a=rows, scale_b=columns, residual=residual, out_dtype=FP8, out_scale=0.5)

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    assert torch.equal(compiled(a, rows, residual).view(UINT8), call(a, rows, residual).view(UINT8))
    assert [str(target) for target in seen if "gemm" in str(target)] == ["cute_kernels.gemm"]


def test_multipliers_are_read_where_they_are():
    a, b, _, rows, columns, residual = make_call(m=64, n=64)
    config = Sm90GemmConfig()
    operands = GEMM.prepared(a=a, b=b, config=config, scale_a=rows, scale_b=columns, residual=residual).operands
    assert operands.scale is None and operands.out_scale is None
    for name, tensor in (("row_scale", rows), ("column_scale", columns), ("residual", residual)):
        assert getattr(operands, name).data_ptr() == tensor.data_ptr()
    number = torch.tensor([3.0])
    operands = GEMM.prepared(a=a, b=b, config=config, scale_a=number, out_dtype=FP8, out_scale=number).operands
    assert operands.scale.data_ptr() == number.data_ptr() == operands.out_scale.data_ptr()
    assert GEMM.prepared(a=a, b=b, config=config, out_dtype=FP8, out_scale=4.0).operands.out_scale == 4.0
    assert GEMM.prepared(a=a.float(), b=b.float(), config=config, allow_tf32=True).operands.scale is None


@pytest.mark.parametrize("facts", [
    {}, {"row_scale": True, "bias": True}, {"row_scale": True, "column_scale": True, "residual": "float32"},
    {"column_scale": True, "out_dtype": "float8_e4m3fn"}, {"scale_source": "pointer", "in_dtype": "uint8"},
    {"out_dtype": "float8_e4m3fn", "out_scale_source": "pointer"}, {"in_dtype": "bfloat16"},
    {"in_dtype": "bfloat16", "with_scale": True}, {"in_dtype": "float16", "row_scale": True},
])  # fmt: skip
def test_examples_have_their_problem(facts):
    problem = GemmProblem(**{"m": 32, "n": 48, "k": 64, "batches": 2, "in_dtype": "float8_e4m3fn"} | facts)
    assert GEMM.problem(GEMM.example(problem)) == problem
    make_plan(problem, arch="sm_90a")
