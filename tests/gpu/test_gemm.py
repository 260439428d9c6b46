"""The dense GEMM on a GPU: every schedule against FP64 and, where sums are exact, bit for bit; guards and graphs."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

import cute_kernels
from cute_kernels.config import GemmProblem
from cute_kernels.operations import gemm as gemm_op
from cute_kernels.operations import reference
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.runtime import gpu
from tests.gpu.gemm_configs import CONFIGS, HALF_CONFIGS, name, with_stages_that_fit
from tests.gpu.harness import sized_gemm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GUARD = 4096
"""Elements before and after the output in which a write beyond it would be seen."""

ACCUMULATION_ERROR = 2.0**-16
"""Bound of the accumulation error relative to ``sum_k |a| |b|``: what FP32 sums of up to 4304 products may lose."""

HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
"""Largest relative error of rounding to a type."""


def draw(m, n, k, batches=0, *, dtype=BF16, seed=0, small_integers=False, bias=True):
    """a, b, bias on the GPU; small integers up to 8 have sums below 2^24, exact in any order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    lead = (batches,) if batches else ()

    def values(*shape):
        if small_integers:
            return torch.randint(-8, 9, shape, generator=generator, device="cuda").to(dtype)
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return values(*lead, m, k), values(*lead, n, k), values(n).float() if bias else None


def fitting(config, a, out_dtype, residual=None):
    """The configuration beside store buffers, numbers of columns (of a bias, be there one or not) and a residual."""
    names = (str(dtype).removeprefix("torch.") for dtype in (a.dtype, out_dtype or a.dtype))
    more = {"bias": True, "residual": None if residual is None else str(residual.dtype).removeprefix("torch.")}
    return with_stages_that_fit(GemmProblem(a.shape[-2], 128, a.shape[-1], 1, *names, **more), config)


def run_guarded(a, b, bias, out_dtype, config, *, sm_count: int | None = None) -> torch.Tensor:
    """One launch into poison between guards; fails if it writes outside of the output or leaves poison in it."""
    prepared = GEMM.prepared(
        a=a, b=b, bias=bias, out_dtype=out_dtype, config=fitting(config, a, out_dtype), allow_tf32=True
    )
    plan = prepared.plan if sm_count is None else dataclasses.replace(prepared.plan, sm_count=sm_count)
    tensors = prepared.operands
    count = tensors.out.numel()
    guarded = torch.full((count + 2 * GUARD,), float("nan"), dtype=tensors.out.dtype, device="cuda")
    out = guarded[GUARD : GUARD + count].view(tensors.out.shape)
    gpu.launch(plan, tensors.replace(out=out))
    torch.cuda.synchronize()
    for where, guard in (("before", guarded[:GUARD]), ("after", guarded[-GUARD:])):
        assert bool(guard.isnan().all()), f"wrote {where} the output"
    result = out[..., : plan.problem.n]
    assert not bool(result.isnan().any()), f"{int(result.isnan().sum())} of {result.numel()} elements not written"
    return result.reshape(*a.shape[:-1], plan.problem.n)


def check(shape, config, record_property, *, batches=0, dtype=BF16, out_dtype=None, bias=True, seed=0, **options):
    """Random data against FP64, and small integers bit for bit against the contract."""
    shape = sized_gemm(*shape)
    a, b, addend = draw(*shape, batches, dtype=dtype, seed=seed, bias=bias)
    out = run_guarded(a, b, addend, out_dtype, config, **options).double()
    expected = a.double() @ b.double().mT + (0 if addend is None else addend.double())
    rounding = HALF_ULP[out_dtype or dtype] * expected.abs() + 2.0**-24 * expected.abs()
    magnitude = a.double().abs() @ b.double().abs().mT
    error = float((((out - expected).abs() - rounding) / magnitude).max())
    record_property("GEMM accumulation error / sum |a| |b|", error)
    assert error <= ACCUMULATION_ERROR, f"accumulation error {error:.3g} of sum |a| |b|"
    a, b, addend = draw(*shape, batches, dtype=dtype, seed=seed, small_integers=True, bias=bias)
    out = run_guarded(a, b, addend, out_dtype, config, **options)
    product = (a.double() @ b.double().mT).float()
    exact = (product if addend is None else product + addend).to(out_dtype or dtype)
    assert torch.equal(out, exact), f"{int((out != exact).sum())} of {out.numel()} elements differ"


@pytest.mark.parametrize("config", HALF_CONFIGS, ids=name)
def test_variant(config, record_property):
    """Partial tiles in all three dimensions, many tiles per cluster, one tile, one row, batches, odd widths."""
    shapes = ((1000, 776, 264), 0), ((130, 97, 1032), 3), ((1, 1, 8), 0), ((3000, 2056, 72), 0), ((64, 4304, 1152), 0)
    for seed, (shape, batches) in enumerate(shapes):
        if shape[2] <= 64 * (getattr(config, "split_k", 1) - 1):
            continue  # each slice of K needs a block
        check(shape, config, record_property, batches=batches, seed=seed, bias=bool(seed % 2))
        check(shape, config, record_property, batches=batches, seed=seed, sm_count=8)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=name)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_types(dtype, out_dtype, bias, config, record_property):
    check((515, 393, 200), config, record_property, dtype=dtype, out_dtype=out_dtype, bias=bias)


@pytest.mark.parametrize("config", HALF_CONFIGS, ids=name)
def test_residual(config, record_property):
    """By TMA into the store buffers, of a width that rows of 16 bytes do not have: bit for bit, small integers."""
    a, b, bias = draw(*sized_gemm(1000, 777, 264), dtype=BF16, small_integers=True)
    residual = torch.randint(-8, 9, (a.shape[0], b.shape[0]), device="cuda").to(BF16)
    out = cute_kernels.gemm(a, b, bias=bias, residual=residual, config=fitting(config, a, BF16, residual))
    assert torch.equal(out, ((a.double() @ b.double().mT).float() + bias + residual.float()).to(BF16))


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_tf32(config, record_property):
    """Rounding by TMA, seen through the identity; random data against FP64 of the rounded operands; exact integers."""
    a, b, _ = draw(*sized_gemm(515, 128, 128), dtype=FP32, seed=1, bias=False)
    rounded = reference.round_tf32(a)
    identity = torch.eye(128, device="cuda")
    assert torch.equal(run_guarded(a, identity, None, None, config), rounded)
    out = run_guarded(a, b, None, None, config).double()
    wide = rounded.double(), reference.round_tf32(b).double().mT
    error = float(((out - wide[0] @ wide[1]).abs() / (wide[0].abs() @ wide[1].abs())).max())
    record_property("TF32 GEMM accumulation error / sum |a| |b|", error)
    assert error <= ACCUMULATION_ERROR, f"accumulation error {error:.3g} of sum |a| |b|"
    for shape, batches in (((1000, 776, 260), 0), ((130, 97, 1036), 3), ((1, 1, 4), 0)):
        a, b, bias = draw(*sized_gemm(*shape), batches, dtype=FP32, small_integers=True)
        out = run_guarded(a, b, bias, None, config)
        assert torch.equal(out, ((a.double() @ b.double().mT).float() + bias))


@pytest.mark.parametrize("k", [8, 56, 64, 72, 128, 192, 264, 1152, 4304])
def test_inner_extent(k, record_property):
    for config in CONFIGS[:4]:
        check((300, 520, k), config, record_property, seed=k)


@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (4096, 4096, 512), (12544, 768, 768), (16384, 4304, 1152)])
def test_default_configuration(shape, record_property):
    check(shape, None, record_property)


@pytest.mark.gpu_only("takes 5 GB")
def test_more_than_two_to_the_31_output_elements(record_property):
    """Offsets beyond 32 bits; rows on both sides of the boundary, and the last ones."""
    m, n, k = 720_000, 3072, 64
    a, b, bias = draw(m, n, k, small_integers=True)
    out = run_guarded(a, b, bias, None, None)
    for first in (0, 2**31 // n - 300, m - 600):
        rows = slice(first, first + 600)
        assert torch.equal(out[rows], ((a[rows].double() @ b.double().T).float() + bias).to(BF16))


def test_results_do_not_depend_on_tiles_or_schedule():
    """Random data: no configuration changes a bit, as all accumulate 16 elements of K at a time in ascending order."""
    a, b, bias = draw(*sized_gemm(700, 600, 1032), seed=3)
    first = run_guarded(a, b, bias, FP32, CONFIGS[0])
    for config in CONFIGS[1:]:
        assert torch.equal(run_guarded(a, b, bias, FP32, config), first), name(config)


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.gpu_only("torch.compile and a CUDA graph")
def test_public_function(out_dtype, record_property):
    """Eager, compiled and replayed from a graph after the inputs changed, odd width and a misaligned slice."""
    a, b, bias = draw(200, 131, 136, small_integers=True)
    expected = reference.gemm(a.cpu(), b.cpu(), bias.cpu(), out_dtype).cuda()
    assert torch.equal(cute_kernels.gemm(a, b, bias=bias, out_dtype=out_dtype), expected)
    off = torch.empty(a.numel() + 1, dtype=BF16, device="cuda")[1:].view(a.shape).copy_(a)
    assert torch.equal(cute_kernels.gemm(off, b, bias=bias, out_dtype=out_dtype), expected)
    compiled = torch.compile(lambda x: cute_kernels.gemm(x, b, bias=bias, out_dtype=out_dtype) * 2, fullgraph=True)
    assert torch.equal(compiled(a), expected * 2)

    static = torch.zeros_like(a)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cute_kernels.gemm(static, b, bias=bias, out_dtype=out_dtype)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cute_kernels.gemm(static, b, bias=bias, out_dtype=out_dtype)
    static.copy_(a)
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.gpu_only("several streams at once")
def test_many_streams_at_once():
    """Launches on several streams and back to back on one: dependent launches must wait for their inputs."""
    a, b, _ = draw(512, 512, 512, small_integers=True, bias=False)
    a = a.clamp(-1, 1)
    chain = b.clamp(-1, 1)
    expected = (a.double() @ chain.double().T).clamp(-1, 1).to(BF16)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = a
            for _ in range(20):
                out = cute_kernels.gemm(a, chain).clamp_(-1, 1)
            results.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)
    # Each product is the input of the next one, with nothing between them on the stream.
    first = cute_kernels.gemm(a, chain)
    second = cute_kernels.gemm(first, chain, out_dtype=FP32)
    assert torch.equal(second.double(), first.double() @ chain.double().T)


def test_repeated_calls_take_the_short_way_and_see_what_changed():
    """The second call of a shape plans nothing; new rows, a changed bias and another output type are seen."""
    a, b, bias = draw(96, 64, 72, small_integers=True)

    def check_call(**options):
        out = cute_kernels.gemm(a, b, bias=bias, **options)
        assert torch.equal(out.cpu(), reference.gemm(a.cpu(), b.cpu(), bias.cpu(), options.get("out_dtype")))

    gemm_op.GEMM.repeated.clear()
    check_call()
    assert len(gemm_op.GEMM.repeated.calls) == 1
    with mock.patch.object(gemm_op.GEMM, "execute", side_effect=AssertionError("the long way")):
        check_call()
        a.add_(1)
        check_call()
        bias.add_(3)
        check_call()
        b.neg_()
        check_call()
    check_call(out_dtype=FP32)
    with pytest.raises(ValueError, match="contiguous"):
        cute_kernels.gemm(a.T.contiguous().T, b, bias=bias)
    wide = a.float(), b.float()
    expected = reference.gemm(wide[0].cpu(), wide[1].cpu(), bias.cpu())
    for _ in range(2):
        assert torch.equal(cute_kernels.gemm(*wide, bias=bias, allow_tf32=True).cpu(), expected)
        with pytest.raises(TypeError, match="allow_tf32=True"):  # also when the shape is known
            cute_kernels.gemm(*wide, bias=bias)
    left = a.clone().requires_grad_()
    cute_kernels.gemm(left, b).float().sum().backward()
    torch.testing.assert_close(left.grad.float(), b.float().sum(0).expand_as(a), rtol=2**-7, atol=0)
