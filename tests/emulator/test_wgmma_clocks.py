"""What warps knew that issued wgmmas: the core shares it between operations, Python keeps it for each of them.

The same random programs, with stores to the operand, fences and barriers between the operations: both must report the
same or nothing, word for word.
"""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.native_wgmma import CoreWgmmas
from tests.emulator.matrix_cases import Wgmma
from tests.emulator.test_wgmma import COMMIT, WAIT, run

WARPS = "shr.u32 %w, %thread, 5;" + "".join(f"setp.eq.u32 %q{i}, %w, {i};" for i in range(4))
STEPS = 4
PROGRAMS = 60


def program(rng: random.Random) -> str:
    """Some of them are in order: a store is often followed by a fence and a barrier."""
    case = Wgmma(n=8, a_in_registers=True, steps=STEPS)
    lines = case.ptx().replace(".reg .pred %p;", ".reg .pred %p, %q<4>; .reg .b32 %w;").splitlines()
    result = []
    for line in lines:
        if line.startswith("wgmma.fence"):
            result.append(WARPS)
        if line.startswith("setp.ne.b32 %p"):
            for _ in range(rng.randrange(3)):
                result += piece(rng)
        result.append(line)
    return "\n".join(result)


def piece(rng: random.Random) -> list[str]:
    warp, waits = rng.randrange(4), f"{COMMIT} {WAIT}"
    store = f"@%q{warp} st.shared.v4.b32 [%wide+0], {{%v0, %v1, %v2, %v3}};"
    older = f"{COMMIT} wgmma.wait_group.sync.aligned 1;"
    return rng.choice([
        [waits, "bar.sync 0;", store, "fence.proxy.async;", "bar.sync 0;"],
        [waits, "bar.sync 0;", store, "fence.proxy.async;", "bar.sync 0;"],
        [waits, store, "fence.proxy.async;", "bar.sync 0;"],
        [older, "bar.sync 0;", store, "fence.proxy.async;", "bar.sync 0;"],
        [waits, "bar.sync 0;", store, "bar.sync 0;"],
        [waits, "bar.sync 0;", store, "fence.proxy.async;"],
        [store, "fence.proxy.async;", "bar.sync 0;"],
        [waits], [older], ["bar.sync 0;"], ["bar.warp.sync -1;"], ["fence.proxy.async;"],
    ])  # fmt: skip


def outcome(text: str, options: Options) -> tuple[str, str, bytes]:
    try:
        out = run(Wgmma(n=8, a_in_registers=True, steps=STEPS), text, options)
    except EmulatorError as error:
        return type(error).__name__, str(error), b""
    return "", "", out.tobytes()


@pytest.mark.parametrize("interleave", ["round_robin", "random"])
def test_reports_are_those_of_operations_that_keep_their_own(
    interleave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, found = random.Random(7), collections.Counter()
    texts = [program(rng) for _ in range(PROGRAMS)]
    schedules = [Options(seed=seed, interleave=interleave) for seed in range(PROGRAMS)]
    shared = [outcome(text, options) for text, options in zip(texts, schedules)]
    asked = []
    monkeypatch.setattr(CoreWgmmas, "learn", lambda *arguments: asked.append(arguments[1:]))  # it never knows operands
    for text, options, core in zip(texts, schedules, shared):
        assert outcome(text, options) == core
        found[core[0]] += 1
    assert asked
    assert found[""] >= 5 and found["SharedMemoryRace"] >= 5 and found["ProxyFenceMissing"] >= 5, found


def test_correct_programs_give_the_product() -> None:
    """What the image holds is stored again, in order: nothing is reported, and the result is the formula's."""
    case = Wgmma(n=8, a_in_registers=True, steps=STEPS)
    between = f"{COMMIT} {WAIT} bar.sync 0; @%q2 st.shared.v4.b32 [%wide+0], {{%v0, %v1, %v2, %v3}}; " \
        "fence.proxy.async; bar.sync 0;\nsetp.ne.b32 %p"
    text = case.ptx().replace(".reg .pred %p;", ".reg .pred %p, %q<4>; .reg .b32 %w;")
    text = text.replace("wgmma.fence", f"{WARPS}\nwgmma.fence").replace("setp.ne.b32 %p", between)
    for seed in range(4):
        out = run(case, text, Options(seed=seed, interleave="random"))
        assert np.array_equal(out, case.fragments(case.expected()))
