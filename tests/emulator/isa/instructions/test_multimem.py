"""multimem: of one GPU, a multicast object is that GPU's memory alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.emulator.errors import GlobalMemoryRace, IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

#: %d1: this thread's 16 bytes of p0, %d2 those of p1; %r4 to %r7 hold what p1 does.
HEAD = """mov.u32 %r1, %tid.x; ld.param.u64 %d3, [p0]; ld.param.u64 %d2, [p1]; mad.wide.u32 %d1, %r1, 16, %d3;
    mad.wide.u32 %d2, %r1, 16, %d2; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2]; mov.b64 %d4, {%r4, %r5};
    mov.b32 {%h4, %h5}, %r4; mov.b32 {%h6, %h7}, %r5;
"""


def run(body: str, memory: np.ndarray, given: np.ndarray, threads: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays afterwards, of 16 bytes for each thread."""
    memory, given = aligned(memory.copy()), aligned(given.copy())
    launch(module(HEAD + body + " ret;"), memory, given, block=(threads, 1, 1), hardware="no multicast object")
    return memory, given


def bits_of(rng: np.random.Generator, dtype: np.dtype, count: int) -> np.ndarray:
    if dtype.kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype)
    return rng.integers(-8, 9, count).astype(dtype)


REDUCTIONS = [
    ("add.u32", "%r4", np.uint32, np.add, 1), ("add.s32", "%r4", np.int32, np.add, 1),
    ("add.u64", "%d4", np.uint64, np.add, 1), ("min.s32", "%r4", np.int32, np.minimum, 1),
    ("max.u32", "%r4", np.uint32, np.maximum, 1), ("min.s64", "%d4", np.int64, np.minimum, 1),
    ("max.u64", "%d4", np.uint64, np.maximum, 1), ("and.b32", "%r4", np.uint32, np.bitwise_and, 1),
    ("or.b64", "%d4", np.uint64, np.bitwise_or, 1), ("xor.b32", "%r4", np.uint32, np.bitwise_xor, 1),
    ("add.f32", "%r4", np.float32, np.add, 1), ("add.f64", "%d4", np.float64, np.add, 1),
    ("add.f16x2", "%r4", np.float16, np.add, 2), ("add.bf16x2", "%r4", ml_dtypes.bfloat16, np.add, 2),
    ("add.v4.f32", "{%r4, %r5, %r6, %r7}", np.float32, np.add, 4),
    ("add.v2.bf16x2", "{%r4, %r5}", ml_dtypes.bfloat16, np.add, 4),
    ("add.v4.f16", "{%h4, %h5, %h6, %h7}", np.float16, np.add, 4),
]  # fmt: skip


@pytest.mark.parametrize("how", [".relaxed.gpu.global", ".release.sys", "", ".relaxed.cta.global"])
@pytest.mark.parametrize(("form", "source", "dtype", "combine", "count"), REDUCTIONS, ids=[x[0] for x in REDUCTIONS])
def test_reductions(form: str, source: str, dtype: type, combine: np.ufunc, count: int, how: str) -> None:
    rng, each = np.random.default_rng(1), 16 // np.dtype(dtype).itemsize
    memory, given = (bits_of(rng, np.dtype(dtype), 32 * each).reshape(32, each) for _ in range(2))
    expected = memory.copy()
    with np.errstate(over="ignore"):
        expected[:, :count] = combine(memory[:, :count], given[:, :count])
    after, _ = run(f"multimem.red{how}.{form} [%d1], {source};", memory, given)
    assert np.array_equal(after, expected)


def test_reductions_of_all_lanes_to_one_place() -> None:
    memory, given = np.zeros((32, 4), np.uint32), np.arange(128, dtype=np.uint32).reshape(32, 4)
    after, _ = run("multimem.red.relaxed.gpu.global.add.u32 [%d3], %r5;", memory, given)
    assert after[0, 0] == given[:, 1].sum() and not after[0, 1:].any() and not after[1:].any()


@pytest.mark.parametrize(("load", "words"), [
    ("multimem.ld_reduce.relaxed.gpu.global.add.u32 %r4, [%d1];", 1), ("multimem.ld_reduce.max.s32 %r4, [%d1];", 1),
    ("multimem.ld_reduce.weak.global.and.b64 %d4, [%d1]; mov.b64 {%r4, %r5}, %d4;", 2),
    ("multimem.ld_reduce.acquire.sys.add.acc::f32.v4.f16x2 {%r4, %r5, %r6, %r7}, [%d1];", 4),
    ("multimem.ld_reduce.global.add.v4.f32 {%r4, %r5, %r6, %r7}, [%d1];", 4),
    ("multimem.ld_reduce.global.min.v2.e4m3x4 {%r4, %r5}, [%d1];", 2),
    ("multimem.ld_reduce.global.max.v4.bf16 {%h4, %h5, %h6, %h7}, [%d1]; mov.b32 %r4, {%h4, %h5};"
     "mov.b32 %r5, {%h6, %h7};", 2),
])  # fmt: skip
def test_reductions_that_are_loaded(load: str, words: int) -> None:
    rng = np.random.default_rng(2)
    memory, given = (rng.integers(0, 2**32, (32, 4), np.uint32) for _ in range(2))
    expected = given.copy()
    expected[:, :words] = memory[:, :words]
    _, after = run(load + "st.global.v4.b32 [%d2], {%r4, %r5, %r6, %r7};", memory, given)
    assert np.array_equal(after, expected)


@pytest.mark.parametrize(("store", "words"), [
    ("multimem.st.relaxed.gpu.global.b32 [%d1], %r4;", 1), ("multimem.st.weak.u64 [%d1], %d4;", 2),
    ("multimem.st.release.sys.global.v4.f32 [%d1], {%r4, %r5, %r6, %r7};", 4),
    ("multimem.st.global.v4.f16 [%d1], {%h4, %h5, %h6, %h7};", 2), ("multimem.st.f16x2 [%d1], %r4;", 1),
])  # fmt: skip
def test_stores(store: str, words: int) -> None:
    rng = np.random.default_rng(3)
    memory, given = (rng.integers(0, 2**32, (32, 4), np.uint32) for _ in range(2))
    expected = memory.copy()
    expected[:, :words] = given[:, :words]
    after, _ = run(store, memory, given)
    assert np.array_equal(after, expected)


@pytest.mark.parametrize("body", [
    "multimem.red.global.add.s64 [%d1], %d4;", "multimem.red.global.min.f16x2 [%d1], %r4;",
    "multimem.red.shared.add.u32 [%d1], %r4;", "multimem.red.global.inc.u32 [%d1], %r4;",
    "multimem.ld_reduce.global.u32 %r4, [%d1];", "multimem.ld_reduce.global.add.b32 %r4, [%d1];",
    "multimem.ld_reduce.global.add.e5m2 %r4, [%d1];",
    "multimem.st.global.add.u32 [%d1], %r4;", "multimem.cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r4], 16;",
])  # fmt: skip
def test_other_forms_are_refused(body: str) -> None:
    with pytest.raises(UnsupportedPTX, match="is not implemented|it takes"):
        run(body, np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32))


@pytest.mark.parametrize(("body", "kind"), [
    ("multimem.red.global.add.u32 [%d1+2], %r4;", IllegalAccess),
    ("multimem.st.global.v4.f32 [%d1+8], {%r4, %r5, %r6, %r7};", IllegalAccess),
    ("mov.u64 %d5, dynamic; cvta.shared.u64 %d5, %d5; multimem.red.add.u32 [%d5], %r4;", IllegalAccess),
    ("setp.lt.u32 %p1, %r1, 32; @%p1 multimem.st.global.b32 [%d3], %r4; @!%p1 multimem.red.global.add.u32 [%d3], %r4;",
     GlobalMemoryRace),
    ("setp.lt.u32 %p1, %r1, 32; @%p1 multimem.st.global.b32 [%d3], %r4;"
     "@!%p1 multimem.ld_reduce.global.add.u32 %r4, [%d3];", GlobalMemoryRace),
])  # fmt: skip
def test_faults_are_reported(body: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        run(body, np.zeros((64, 4), np.uint32), np.zeros((64, 4), np.uint32), threads=64)
