"""The floating-point environment of a program changes no bit of an emulated kernel, and the program keeps it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cute_kernels.emulator import IllegalAccess, Options
from cute_kernels.emulator.machine.bytecode.execution import translate
from cute_kernels.operations import reference
from cute_kernels.testing.compare import assert_matches
from cute_kernels.testing.ptx import aligned, launch, module
from tests.emulator.instruction_cases import FORMATS, Case, draw_value, text_of
from tests.emulator.isa.instructions import test_instruction_forms as forms
from tests.emulator.isa.instructions.test_conversions import CONVERSION
from tests.emulator.isa.instructions.test_instructions import FLOAT, INTEGER

LIBRARY = ctypes.CDLL(None)
NEAREST, UP, TO_ZERO = 0, 0x800, 0xC00  # FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO on x86-64
TINY = np.array([1e-40], np.float32)  # a denormal number
#: An entry of the environment: its name -> what sets it.
ENVIRONMENTS: dict[str, Callable[[], object]] = {
    "flushed denormals": lambda: torch.set_flush_denormal(True),
    "up": lambda: LIBRARY.fesetround(UP),
    "to zero": lambda: LIBRARY.fesetround(TO_ZERO),
}
#: Arithmetic that more than one lane, or memory, takes part in: body of a kernel that reads %r2, %r3 and writes %r4.
PUT = "st.shared.b32 [%r9], %r2;"
OTHERS = {
    **{
        kind: f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 "
        "{%r4, %r5, %r6, %r7}, {%r2, %r3, %r2, %r3}, {%r3, %r2}, {%r3, %r3, %r3, %r3};"
        for kind, k in (("tf32", 8), ("bf16", 16), ("f16", 16), ("e4m3", 32))
    },
    **{
        f"atom of {kind}": f"{PUT} atom.shared.add{mode}.{kind} %r8, [%r9], %r3; ld.shared.b32 %r4, [%r9];"
        for kind, mode in (("f32", ""), ("f16x2", ".noftz"), ("bf16x2", ".noftz"))
    },
    "approximations": "rsqrt.approx.f32 %r4, %r2; sin.approx.f32 %r5, %r3; xor.b32 %r4, %r4, %r5;",
}


def cases() -> list[Case]:
    every = (INTEGER, FLOAT, CONVERSION, forms.INTEGER, forms.FLOAT)
    return list({case.text: case for each in every for case in each.values()}.values())


@pytest.fixture(params=ENVIRONMENTS)
def environment(request: pytest.FixtureRequest) -> Callable[[], object]:
    """What sets an environment; the test ends in the default one."""
    yield ENVIRONMENTS[request.param]
    torch.set_flush_denormal(False)
    LIBRARY.fesetround(NEAREST)


def state() -> tuple[int, bool]:
    """Rounding mode, and whether denormal results are flushed."""
    return LIBRARY.fegetround(), bool((TINY * np.float32(0.5) == 0).all())


def inside(environment: Callable[[], object], function: Callable[[], object]) -> object:
    """The function's result in an environment, which must be the same before and after."""
    environment()
    before = state()
    try:
        return function()
    finally:
        after = state()
        torch.set_flush_denormal(False)
        LIBRARY.fesetround(NEAREST)
        assert before == after != (NEAREST, False)


def result(case: Case) -> np.ndarray:
    """Rows of operands and results of a case; of its floats many are denormal, and sums of others are rounded."""
    rng, kinds = random.Random(case.text), case.kinds or "i" * len(case.sources)
    data = np.zeros((102, len(case.sources) + 1), np.uint64)
    for row, column in itertools.product(range(len(data)), range(len(case.sources))):
        kind, bits = kinds[column], case.sources[column]
        value = draw_value(rng, kind, bits)
        if kind == "f" and bits in FORMATS and row % 3 == 0:
            value &= (1 << FORMATS[bits].fraction_bits) - 1
        data[row, column] = value
    return data


def executed(text: str, given: np.ndarray, options: Options | None = None) -> np.ndarray:
    data = aligned(given.copy())
    launch(text, data, options=options)
    return data


def other(body: str) -> str:
    """A kernel whose threads each read two words and write one in place of the first."""
    head = "mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 8, %d1; mov.u32 %r9, words;"
    head += ".shared .align 4 .b8 words[128]; mad.lo.u32 %r9, %r1, 4, %r9; ld.global.v2.b32 {%r2, %r3}, [%d1];"
    return module(f"{head} {body} st.global.b32 [%d1], %r4; ret;", parameters=1, target="sm_90a")


def test_arithmetic() -> None:
    """Every arithmetic opcode has the same bits in all environments."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (32, 2), dtype=np.uint32)
    words[::3] &= 0x807FFFFF
    texts = [(case.text, text_of(case), result(case)) for case in cases()]
    texts += [(name, other(body), words) for name, body in OTHERS.items()]
    options = Options(detectors=False)
    wrong = []
    for name, text, given in texts:
        right = executed(text, given, options)
        for environment, sets in ENVIRONMENTS.items():  # translated once
            if not np.array_equal(right, inside(sets, functools.partial(executed, text, given, options))):
                wrong.append(f"{name} with {environment}")
    assert not wrong, f"{len(wrong)} of {len(texts)} differ"


def test_constants_are_folded_alike(environment: Callable[[], object]) -> None:
    """What is known at translation is computed there, and kept for the next launch."""
    body = "mov.b32 %r2, 0x00000123; mov.b32 %r3, 0x3f8ccccd; mul.rn.f32 %r4, %r2, %r3;"
    text = other(f"{body} div.rn.f32 %r5, %r3, 0f40400000; add.rn.f32 %r4, %r4, 0f00000001; xor.b32 %r4, %r4, %r5;")
    zeros = np.zeros((32, 2), np.uint32)
    right = executed(text, zeros)
    translate.cache_clear()
    assert np.array_equal(right, inside(environment, lambda: executed(text, zeros)))


def test_processes_and_threads(environment: Callable[[], object]) -> None:
    """Clusters in forked processes, and launches in threads with an environment of their own."""
    head = "mov.u32 %r1, %ctaid.x; ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 8, %d1;"
    text = module(
        f"{head} ld.global.v2.b32 {{%r2, %r3}}, [%d1]; mul.rn.f32 %r4, %r2, %r3; st.global.b32 [%d1], %r4; ret;",
        parameters=1,
    )  # fmt: skip
    given = np.array([[0x00345678 + i, 0x3F8CCCCD] for i in range(8)], np.uint32)

    def run() -> np.ndarray:
        data = aligned(given.copy())
        report = launch(text, data, grid=8, options=Options(processes=2))
        assert report.processes == 2
        return data

    right, found = run(), []
    assert np.array_equal(right, inside(environment, run))
    thread = threading.Thread(target=lambda: found.append(inside(environment, run)))
    thread.start()
    thread.join()
    assert np.array_equal(right, found[0])


def test_after_an_error(environment: Callable[[], object]) -> None:
    text = module("mov.u64 %d1, 0; ld.global.u32 %r1, [%d1]; ret;", parameters=1)
    with pytest.raises(IllegalAccess):
        inside(environment, lambda: executed(text, TINY))


def test_references(environment: Callable[[], object]) -> None:
    """What kernels are compared with, and the comparison."""
    torch.manual_seed(0)
    a, b = torch.randn(16, 64) * 1e-20, torch.randn(8, 64) * 1e-20
    right = reference.gemm(a, b, out_dtype=torch.float32)
    assert torch.equal(right, inside(environment, lambda: reference.gemm(a, b, out_dtype=torch.float32)))
    with pytest.raises(AssertionError, match="1 of 1"):
        inside(environment, lambda: assert_matches(torch.tensor([0.0]), torch.from_numpy(TINY)))
