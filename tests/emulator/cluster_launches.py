"""Launches of six small clusters in one process and in several, compared in everything that they leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from cute_kernels.emulator import GlobalMemory, Options, Report, run
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.testing.ptx import aligned, module
from tests.nightly import daily_or_all

SCHEDULES = [
    Options(),
    Options(seed=3, completion="lazy", interleave="starve"),
    Options(seed=11, completion="random", interleave="random", spurious_try_wait_failures=True),
]
CTAS = 6
#: Processes that share the clusters: each is forked off the process of the suite, which takes a tenth of a second.
COUNTS = daily_or_all((2,), (2, 3, 4))
#: ``%d1``: the item of the thread in p0, ``%r2``: its CTA. CTAs of 32 threads.
PLACE = """mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 32, %r1; ld.param.u64 %d0, [p0];
    mul.wide.u32 %d1, %r3, 4; add.s64 %d1, %d0, %d1; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 3;
    setp.eq.u32 %p3, %r2, 4;"""


def plain(report: Report) -> str:
    """Everything of a report but the time and how many processes there were, the order of its tables included."""
    return repr(dataclasses.replace(report, seconds=0.0, processes=1, one_process=""))


def told(error: EmulatorError) -> tuple[object, ...]:
    return type(error), str(error), getattr(error, "report", ""), repr(error.facts)


def outcome(body: str, options: Options, values: np.ndarray, **more: Any) -> tuple[bytes, tuple[object, ...] | Report]:
    """Memory after a launch of `CTAS` CTAs of a warp on an array, and its report or error."""
    out = more.pop("out", None)
    out = aligned(values) if out is None else out
    out[...] = values
    memory = GlobalMemory()
    memory.register_tensor(out, "out")
    text = module(f"{PLACE} {body}", parameters=1)
    shape = {"grid": CTAS, "block": 32, "dynamic_smem": 1024, **more}
    try:
        found = run(text, params=out.ctypes.data.to_bytes(8, "little"), memory=memory, options=options, **shape)
    except EmulatorError as error:
        found = told(error)
    return out.tobytes(), found


def compare(
    body: str,
    options: Options | None = None,
    values: np.ndarray | None = None,
    processes: Iterable[int] = COUNTS,
    **more: Any,
) -> Report | None:
    """A launch in one process and in several is the same; the report of the last one, None after an error."""
    values = np.arange(CTAS * 32, dtype=np.uint32) if values is None else values
    out = aligned(values)
    options = options or Options()
    content, one = outcome(body, options, values, out=out, **more)
    for count in processes:
        several = dataclasses.replace(options, processes=count)
        again, found = outcome(body, several, values, out=out, **more)
        assert again == content
        if isinstance(one, tuple):
            assert found == one
        else:
            assert plain(found) == plain(one)
            assert (found.processes > 1) != bool(found.one_process)
    return None if isinstance(one, tuple) else found
