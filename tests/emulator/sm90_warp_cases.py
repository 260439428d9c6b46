"""Cases of sm90_cases.py for exchange between threads: bar.red, match.sync."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.emulator.matrix_cases import noise
from tests.emulator.sm90_cases import Case, kernel

LOAD = "add.s64 %x1, %in0, %word;\nsub.s64 %x1, %x1, %out;\nld.global.b32 %r1, [%x1];\n"


def warp_cases() -> Iterator[Case]:
    votes = (noise("votes", 96) % 2).astype(np.uint32)
    for name, data in (("mixed", votes), ("none", votes * 0), ("all", votes * 0 + 1)):
        vote = f"{LOAD}setp.ne.b32 %p0, %r1, 0;\n"
        count = vote + "bar.red.popc.u32 %r2, 3, %p0;\nst.global.b32 [%word], %r2;"
        expected = np.full(96, data.sum(), np.uint32)
        yield Case(f"bar.red.popc {name}", kernel(count, 1), (data,), expected, block=96)
        for mode, holds in (("and", data.all()), ("or", data.any())):
            test = f"{vote}barrier.cta.red.{mode}.pred %p1, 3, 96, %p0;\nselp.b32 %r2, 1, 0, %p1;\n"
            test += "st.global.b32 [%word], %r2;"
            yield Case(f"barrier.red.{mode} {name}", kernel(test, 1), (data,), np.full(96, holds, np.uint32), block=96)
    few = (noise("match", 32) % 5).astype(np.uint32)
    matching = np.array([sum(1 << j for j in range(32) if few[j] == few[i]) for i in range(32)], np.uint32)
    body = LOAD + "match.any.sync.b32 %r2, %r1, 0xffffffff;\nst.global.b32 [%word], %r2;"
    yield Case("match.any.b32", kernel(body, 1), (few,), matching)
    body = LOAD + "cvt.u64.u32 %x2, %r1;\nshl.b64 %x2, %x2, 40;\nmatch.any.sync.b64 %r2, %x2, 0xffffffff;\n"
    yield Case("match.any.b64", kernel(body + "st.global.b32 [%word], %r2;", 1), (few,), matching)
    for name, data in (("same", few * 0 + 9), ("different", few)):
        body = LOAD + "match.all.sync.b32 %r2|%p0, %r1, 0xffffffff;\nselp.b32 %r3, 7, 3, %p0;\nxor.b32 %r2, %r2, %r3;\n"
        expected = np.full(32, 0xFFFFFFFF ^ 7 if name == "same" else 3, np.uint32)
        yield Case(f"match.all {name}", kernel(body + "st.global.b32 [%word], %r2;", 1), (data,), expected)
