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
from cute_kernels.emulator.units.matrix.core_wgmma import CoreWgmmas
from cute_kernels.emulator.units.matrix.wgmma import WgmmaUnit
from tests.emulator.matrix_cases import Wgmma
from tests.emulator.units.matrix.test_wgmma import COMMIT, WAIT, run

WARPS = "shr.u32 %w, %thread, 5; " + " ".join(f"setp.eq.u32 %q{i}, %w, {i};" for i in range(4))
REGISTERS = ".reg .pred %p, %q<5>; .reg .b32 %w;"
STEPS = 4
PROGRAMS = 60
STORE = " ".join(f"st.shared.v4.b32 [%i+{place}], {{%v0, %v1, %v2, %v3}};" for place in (0, 512))  # all of B
FENCE = "fence.proxy.async;"
BARRIER = "bar.sync 0;"


def program(rng: random.Random, only_in_order: bool = False) -> str:
    """A warpgroup, and a fifth warp that stores to its operand. Some of them are in order."""
    case = Wgmma(n=8, a_in_registers=True, steps=STEPS)
    lines = case.ptx().replace(".reg .pred %p;", REGISTERS).splitlines()
    main, other, label, step = [], [], 0, 0
    for line in lines:
        if line.startswith("ld.param"):
            main.append("setp.ge.u32 %q4, %thread, 128; mov.u32 %shared, dynamic; @%q4 bra OTHER;")
        if line.startswith("wgmma.fence"):
            main.append(WARPS)
        if line.startswith("setp.ne.b32 %p"):
            for _ in range(0 if only_in_order else rng.randrange(3)):
                label += 1
                mine, others = piece(rng, label)
                main.append(mine)
                other.append(others)
            if only_in_order or rng.randrange(2):  # in order while the operations before may be in flight
                main.append(f"{BARRIER} {BARRIER}")
                other.append(f"{BARRIER} {stores(step)} {FENCE} {BARRIER}")
            step += 1
        main.append(line)
    assert main[-1] == "}"
    first = "mov.b32 %v0, 0; mov.b32 %v1, 0; mov.b32 %v2, 0; mov.b32 %v3, 0; bar.sync 0;"
    first += "and.b32 %i, %thread, 31; shl.b32 %i, %i, 4; add.u32 %i, %i, %shared;"
    return "\n".join([*main[:-1], "OTHER:", first, *other, "ret;", "}"])


def stores(step: int) -> str:
    """All that operation number ``step`` reads, and no other: two chunks of 16 bytes of each of 8 rows, swizzled."""
    places = [128 * row + 16 * (chunk ^ row) for row in range(8) for chunk in (2 * step, 2 * step + 1)]
    values = "{%v0, %v1, %v2, %v3}"
    each = (f"@%q0 st.shared.v4.b32 [%shared+{place}], {values};" for place in places)
    return f"setp.eq.u32 %q0, %thread, 128; {' '.join(each)}"


def piece(rng: random.Random, label: int) -> tuple[str, str]:
    """What the warpgroup and the other warp do between two operations."""
    warp, waits = rng.randrange(4), f"{COMMIT} {WAIT}"
    older = f"{COMMIT} wgmma.wait_group.sync.aligned 1;"
    alone = f"@!%q{warp} bra S{label}; bar.sync {5 + warp}, 64; S{label}:"  # one warp learns of it
    return rng.choice([
        (f"{waits} {BARRIER} {BARRIER}", f"{BARRIER} {STORE} {FENCE} {BARRIER}"),
        (f"{waits} {BARRIER} {BARRIER}", f"{BARRIER} {STORE} {FENCE} {BARRIER}"),
        (f"{waits} {BARRIER} {BARRIER}", f"{BARRIER} {STORE} {FENCE} {BARRIER}"),
        (f"{waits} {BARRIER} {BARRIER} {FENCE}", f"{BARRIER} {STORE} {BARRIER}"),
        (f"{waits} {BARRIER} {BARRIER}", f"{BARRIER} {STORE} {BARRIER}"),
        (f"{older} {BARRIER} {BARRIER}", f"{BARRIER} {STORE} {FENCE} {BARRIER}"),
        (f"{waits} {BARRIER} {alone}", f"{BARRIER} {STORE} {FENCE} bar.sync {5 + warp}, 64;"),
        (f"{waits} {BARRIER} {alone}", f"{BARRIER} {STORE} {FENCE} bar.sync {5 + warp}, 64;"),
        (f"{BARRIER} {alone}", f"{STORE} {FENCE} {BARRIER} bar.sync {5 + warp}, 64;"),
        (alone, f"{STORE} {FENCE} bar.sync {5 + warp}, 64;"),
        (alone, f"{FENCE} bar.sync {5 + warp}, 64;"),
        (waits, ""), (older, ""), (BARRIER, BARRIER),
    ])  # fmt: skip


def outcome(text: str, options: Options) -> tuple[str, str, bytes]:
    try:
        out = run(Wgmma(n=8, a_in_registers=True, steps=STEPS), text, options, threads=160)
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
    assert all(found[kind] >= 3 for kind in ("", "SharedMemoryRace", "ProxyFenceMissing")), found


def test_the_core_knows_what_a_warp_outside_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's part of B becomes 0 while earlier steps are in flight: D stays as it was, and Python does nothing."""
    issued = []
    monkeypatch.setattr(WgmmaUnit, "issue", lambda *arguments: issued.append(arguments))
    case = Wgmma(n=8, a_in_registers=True, steps=STEPS)
    d = case.registers()[4 * STEPS :].reshape(-1)
    for seed in range(4):
        out = run(case, program(random.Random(0), only_in_order=True), Options(seed=seed, interleave="random"), 160)
        assert np.array_equal(out.reshape(-1), d)
    assert not issued
