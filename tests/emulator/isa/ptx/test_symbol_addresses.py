"""Addresses of variables: with an offset in mov, and in which state spaces atomics may use them."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch

HEAD = ".global .align 8 .u32 table[4] = {11, 22, 33, 44}; .shared .align 8 .u32 words[4];"


def execute(body: str) -> list[int]:
    out = aligned(np.zeros(4, np.uint32))
    text = f"ld.param.u64 %d1, [p0]; {body} st.global.u32 [%d1], %r1; st.global.u32 [%d1+4], %r2; ret;"
    launch(module(text, parameters=1, head=HEAD), out, block=(1, 1, 1))
    return out[:2].tolist()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.u64 %d2, table+8; ld.global.u32 %r1, [%d2]; ld.global.u32 %r2, [%d2+-4];", [33, 22]),
        ("mov.u64 %d2, table+0xC; ld.global.u32 %r1, [%d2]; mov.b64 %d3, table; sub.u64 %d4, %d2, %d3; "
         "cvt.u32.u64 %r2, %d4;", [44, 12]),
        ("mov.u64 %d2, table+-8; ld.global.u32 %r1, [%d2+8]; ld.global.u32 %r2, [%d2+20];", [11, 44]),
        ("mov.u32 %r5, words; mov.u32 %r6, words+12; sub.u32 %r1, %r6, %r5; mov.u32 %r7, 5; st.shared.u32 [%r6], %r7; "
         "ld.shared.u32 %r2, [words+12];", [12, 5]),
        ("mov.u64 %d2, p0+4; ld.param.u32 %r1, [%d2]; ld.param.u32 %r2, [p0+4]; sub.u32 %r1, %r1, %r2; "
         "mov.u32 %r2, 1;", [0, 1]),
        (".local .align 8 .b8 depot[16]; mov.u64 %d2, depot; mov.u64 %d3, depot+4; mov.u32 %r5, 7; "
         "st.local.u32 [%d3], %r5; ld.local.u32 %r1, [%d2+4]; sub.u64 %d4, %d3, %d2; cvt.u32.u64 %r2, %d4;", [7, 4]),
    ],
)  # fmt: skip
def test_mov_of_an_address_with_an_offset(body: str, expected: list[int]) -> None:
    assert execute(body) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.u64 %d2, table+18446744073709551615+1;", "18446744073709551616 of an address has more than 64 bits"),
        ("mov.u64 %d2, table+;", "a number is expected"),
        ("mov.u64 %d2, nowhere+8;", r"'nowhere' is not a variable or parameter"),
        ("mov.u64 %d2, %d1+8;", "',' expected"),
        ("mov.u64 table+8, %d2;", r"operand d of mov.u64 is table\+8: must be a register"),
        ("mov.u16 %h1, table+8;", r"mov.u16 of an address is not implemented, .u32 and .u64 are"),
        ("add.u64 %d2, table+8, %d1;", "',' expected"),
    ],
)
def test_what_is_no_address_with_an_offset(body: str, message: str) -> None:
    with pytest.raises(UnsupportedPTX, match=message) as error:
        execute(body)
    assert error.value.ptx_line is not None


@pytest.mark.parametrize(
    "atomic", ["atom.add.u32 %r1, [%d3], 1;", "red.add.u32 [%d3], 1;", "atom.exch.b128 %q1, [%d3], %q2;"]
)
@pytest.mark.parametrize(
    ("address", "place"),
    [("mov.u64 %d2, depot; cvta.local.u64 %d3, %d2;", "local memory"), ("mov.u64 %d3, p0;", "the kernel parameters")],
)
def test_atomics_are_for_global_and_shared_memory(atomic: str, address: str, place: str) -> None:
    body = f".reg .b128 %q<4>; .local .align 16 .b8 depot[32]; mov.b128 %q2, {{%d1, %d1}}; {address} {atomic}"
    with pytest.raises(IllegalAccess, match=f"an address of {place}: atomics are for global and shared memory"):
        execute(body)


def test_a_load_that_all_lanes_share_of_local_memory() -> None:
    """Which no program can mean: the address is a literal."""
    with pytest.raises(IllegalAccess, match="an address of local memory, another place in each lane"):
        execute(".local .align 16 .b8 depot[32]; mov.u64 %d3, 0x3000000000000000; ld.u32 %r1, [%d3];")
