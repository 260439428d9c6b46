"""Loads, stores and atomics by the lanes of a warp: what each of them moves, and who comes later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.machine.state.test_warp import M32, per_thread
from tests.emulator.ptx_launch import launch


@given(seed=st.integers(0, 1000), spaces=st.sampled_from(["global", "shared"]))
def test_vector_accesses_of_every_width(seed: int, spaces: str):
    """Bytes go to shared or global memory by one width and come back by another."""
    rng = np.random.default_rng(seed)
    data = aligned(rng.integers(0, 256, 32 * 32, np.uint8))
    out = aligned(np.zeros(32 * 32, np.uint8))
    widths = [("v4.b32", 4, 4), ("v2.b64", 8, 2), ("b64", 8, 1), ("v2.b32", 4, 2), ("b32", 4, 1), ("v4.b16", 2, 4),
              ("b16", 2, 1), ("b8", 1, 1), ("v2.b8", 1, 2)]  # fmt: skip
    if spaces == "global":
        widths.append(("v8.b32", 4, 8))
    store, load = (widths[i] for i in rng.integers(0, len(widths), 2))
    names = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}
    lines = [
        "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 5; cvt.u64.u32 %d9, %r2; ld.param.u64 %d1, [p0];",
        "ld.param.u64 %d2, [p1];",
        "add.s64 %d1, %d1, %d9; add.s64 %d2, %d2, %d9; mov.b32 %r3, dynamic; add.s32 %r3, %r3, %r2;",
    ]

    def copy(source: str, target: str, width: tuple[str, int, int], base: int) -> None:
        text, size, count = width
        for at in range(0, 32, size * count):
            registers = [f"{names[size]}{base + i}" for i in range(count)]
            vector = registers[0] if count == 1 else "{" + ", ".join(registers) + "}"
            lines.append(f"ld.{source.format(text=text, at=at)};".replace("VALUE", vector))
            lines.append(f"st.{target.format(text=text, at=at)};".replace("VALUE", vector))

    middle = "shared.{text} [%r3+{at}], VALUE" if spaces == "shared" else "global.{text} [%d2+{at}], VALUE"
    back = "shared.{text} VALUE, [%r3+{at}]" if spaces == "shared" else "global.{text} VALUE, [%d2+{at}]"
    copy("global.{text} VALUE, [%d1+{at}]", middle, store, 10)
    copy(back, "global.{text} [%d2+{at}], VALUE", load, 40)
    lines.append("ret;")
    launch(module("\n".join(lines)), data, out)
    assert out.tolist() == data.tolist()


def test_of_stores_to_one_address_the_later_instruction_wins():
    out = np.zeros(2, np.uint32)
    text = module(
        """ld.param.u64 %d1, [p0]; mov.u32 %r1, %laneid; mul.wide.u32 %d2, %r1, 0; add.s64 %d2, %d2, %d1;
        add.s32 %r2, %r1, 1000; st.global.b32 [%d2], %r2; mov.b32 %r3, 5; st.global.b32 [%d2], %r3;
        st.global.b32 [%d2+4], %r3; ret;""",
        parameters=1,
    )
    launch(text, out)
    assert out.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("add.u32", lambda a, b: a + b & M32),
        ("max.u32", max),
        ("min.s32", lambda a, b: min(a, b, key=lambda x: x - (1 << 32) if x >> 31 else x)),
        ("xor.b32", lambda a, b: a ^ b),
        ("exch.b32", lambda a, b: b),
        ("inc.u32", lambda a, b: 0 if a >= b else a + 1),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics_on_one_cell_are_serial(name: str, python, space: str):
    """Each lane's old value is the fold of those before it, in some order: here lane order."""
    out = np.zeros(33, np.uint32)
    out[32] = 17
    cell = "[%d2+128]" if space == "global" else "[dynamic]"
    text = module(
        f"""mov.u32 %r1, %tid.x; ld.param.u64 %d2, [p0]; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d2, %d1;
        ld.global.b32 %r3, [%d2+128]; st.shared.b32 [dynamic], %r3; mul.lo.u32 %r4, %r1, 2654435761;
        atom.{space}.{name} %r5, {cell}, %r4; st.global.b32 [%d1], %r5; bar.sync 0;
        ld.{space}.b32 %r6, {cell}; st.global.b32 [%d2+128], %r6; ret;""",
        parameters=1,
    )
    launch(text, out, hardware="which lane comes first, which PTX leaves open")
    state, old = 17, []
    for lane in range(32):
        old.append(state)
        state = python(state, lane * 2654435761 & M32)
    assert out.tolist() == [*old, state]


def test_an_access_outside_memory_names_the_instruction():
    with pytest.raises(IllegalAccess, match=r"at PTX line \d+ `ld\.global\.b32 %r9, \[%d1\+4096\]`.*CTA 0 warp 0"):
        per_thread("ld.global.b32 %r9, [%d1+4096];")
