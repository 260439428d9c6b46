"""Local memory: what it holds, and every fault."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.bytecode.execution import Execution
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

BYTES = 256
DEPOT = f".local .align 16 .b8 before[8]; .local .align 16 .b8 depot[{BYTES}];"
HEAD = """
    mov.u32 %r1, %tid.x; ld.param.u64 %d1, [p0]; mad.wide.u32 %d1, %r1, 4, %d1; mov.b64 %d2, depot;
"""


def execute(body: str, options: Options, threads: int = 64) -> np.ndarray:
    out = aligned(np.zeros(threads, np.uint32))
    text = module(f"{DEPOT}{HEAD}{body} ret;", parameters=1)
    launch(text, out, block=(threads, 1, 1), options=options)
    return out


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("counters", [False, True])
def test_every_lane_has_its_own(width: int, generic: bool, counters: bool) -> None:
    """Lane by lane another place is written, by all lanes but the ninth, and summed up by 16 bits."""
    element = {1: "u8", 2: "u16"}.get(width, "u32")
    count = max(width // 4, 1)
    names = [f"%h{i}" if width <= 2 else f"%r{50 + i}" for i in range(count)]
    group = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    what = ("" if generic else ".local") + (f".v{count}" if count > 1 else "") + f".{element}"
    values, added = "cvt.u16.u32 %h0, %r2;", "cvt.u32.u16 %r50, %h0; add.u32 %r6, %r6, %r50;"
    if width > 2:
        values = "".join(f"add.u32 {name}, %r2, {i};" for i, name in enumerate(names))
        added = "".join(f"add.u32 %r6, %r6, {name};" for name in names)
    places = BYTES // width
    body = f"""
        {"cvta.local.u64 %d2, %d2;" if generic else ""} mov.u32 %r2, 0; mov.u32 %r6, 0; setp.ne.u32 %p1, %r1, 9;
    FILL:
        {values} add.u32 %r3, %r2, %r1; and.b32 %r3, %r3, {places - 1}; mad.wide.u32 %d3, %r3, {width}, %d2;
        @%p1 st{what} [%d3], {group};
        add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, {places};
        @%p2 bra FILL;
        ld{what} {group}, [%d2+{5 * width}]; {added}
        ld{what} {group}, [%d2+{BYTES - width}]; {added}
        st.global.u32 [%d1], %r6;
    """
    number = np.arange(64)
    steps = [(place - number) % places for place in (5, places - 1)]  # that wrote there
    mask = (1 << 8 * min(width, 4)) - 1
    expected = sum((step + i) & mask for step in steps for i in range(count))
    expected[9] = 0
    assert execute(body, Options(counters=counters)).tolist() == expected.tolist()


def test_an_address_that_is_one_number_is_another_place_in_each_lane() -> None:
    """Known when the block is translated, and computed from what all lanes share."""
    body = """
        cvta.local.u64 %d3, %d2; mov.u32 %r5, %ntid.x; cvt.u64.u32 %d4, %r5; add.s64 %d5, %d3, %d4; add.u32 %r6, %r1, 7;
        st.local.u32 [%d2+4], %r1; st.local.u32 [%d2+64], %r6;
        ld.u32 %r3, [%d3+4]; ld.u32 %r4, [%d5]; mad.lo.u32 %r3, %r4, 1000, %r3; st.global.u32 [%d1], %r3;
    """
    assert execute(body, Options()).tolist() == [1000 * (lane + 7) + lane for lane in range(64)]


def test_an_access_is_no_call_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    called: Counter[str] = Counter()
    call = Execution.call

    def counted(self: Execution, site: int, mask: int) -> int:
        instruction = self.translation.sites[site].instruction
        called[instruction.opcode if instruction is not None else ""] += 1
        return call(self, site, mask)

    monkeypatch.setattr(Execution, "call", counted)
    body = """
        cvta.local.u64 %d3, %d2; st.local.u32 [%d2+4], %r1; ld.u32 %r3, [%d3+4]; st.u32 [%d3+8], %r3;
        ld.local.u32 %r4, [%d2+8]; st.global.u32 [%d1], %r4;
    """
    assert execute(body, Options()).tolist() == list(range(64))
    assert not [name for name in called if name.startswith(("ld", "st"))]


LEAVES, MIXED = "of 272 bytes", "lanes address different spaces, or parameters"
FAULTS = {
    "misaligned": ("st.local.u32 [%d2+2], %r1;", "local access of 4 bytes at ['0x12'] of 272 bytes"),
    "misaligned vector": ("st.local.v2.u32 [%d2+4], {%r1, %r1};", "local access of 8 bytes at ['0x14'] of 272 bytes"),
    "end": (f"ld.local.u32 %r3, [%d2+{BYTES}];", LEAVES),
    "vector over the end": (f"ld.local.v4.u32 {{%r3, %r4, %r5, %r6}}, [%d2+{BYTES - 8}];", LEAVES),
    "one lane outside": (
        f"setp.eq.u32 %p1, %r1, 40; selp.b64 %d3, {BYTES + 16}, %d2, %p1; ld.local.u32 %r3, [%d3];",
        "local access of 4 bytes at ['0x10', '0x110'] of",
    ),
    "in front": ("add.s64 %d3, %d2, -64; ld.local.u32 %r3, [%d3];", "at ['-0x30'] of"),
    "generic end": (f"cvta.local.u64 %d3, %d2; st.u32 [%d3+{BYTES}], %r1;", LEAVES),
    "lanes in two spaces": (
        "cvta.local.u64 %d3, %d2; setp.lt.u32 %p1, %r1, 8; selp.b64 %d3, %d1, %d3, %p1; st.u32 [%d3], %r1;", MIXED,
    ),
    "lanes in two spaces, the others first": (
        "cvta.local.u64 %d3, %d2; setp.ge.u32 %p1, %r1, 8; selp.b64 %d3, %d1, %d3, %p1; st.u32 [%d3], %r1;", MIXED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(name: str) -> None:
    body, words = FAULTS[name]
    with pytest.raises(EmulatorError) as caught:
        execute(body, Options())
    assert words in str(caught.value) and "PTX line" in str(caught.value)


def test_a_kernel_without_local_memory() -> None:
    """What an earlier kernel has left behind is not there."""
    execute("st.local.u32 [%d2], %r1;", Options())
    with pytest.raises(EmulatorError, match="local memory by a kernel that declares none"):
        launch(module("mov.u32 %r1, 0; ld.local.u32 %r2, [%r1]; ret;"), 0, 0, options=Options())
