"""Launches whose timelines are frozen, and what they are: ``data/traces/digests.json`` has a digest of each.

``python -m tests.emulator.observe.timelines`` writes that anew, where timelines are meant to differ.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.emulator import Options
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.machine.units.test_core_units import COPY, MISSED, TIME_OUTS
from tests.emulator.observe.test_trace import ARRIVE, BULK, HANDSHAKE, Event, read
from tests.emulator.oracle import records
from tests.emulator.ptx_launch import launch

DATA = Path(__file__).parents[1] / "data" / "traces"
SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "no detectors": {"detectors": False},
    "any warp": {"interleave": "random", "seed": 3},
    "late": {"completion": "lazy"},
    "random": {"completion": "random", "interleave": "random", "seed": 5, "spurious_try_wait_failures": True},
    "starved": {"completion": "random", "interleave": "starve", "seed": 7},
}
DAILY = (
    "sm100-one-cta", "sm90-one-cta", "gemm-sm100-two-pairs", "gemm-sm90-pingpong", "images-sm100", "images-sm90-repack",
)  # fmt: skip


def of_target(name: str, path: Path, mutant: str = "", **options: Any) -> list[Event]:
    """What a launch of our kernels shows that is frozen, faults of mutants included."""
    frozen = records.read(name).launch
    ptx = records.mutated(frozen, mutant)
    outcome = frozen.execute(ptx, Options(trace=path, max_warp_instructions=frozen.limit, **options))
    assert mutant or not outcome.error
    return read(path)


# Warp 0 or warp 1 waits for all live threads of the CTA; the other one exits.
EARLY_EXIT = """
    mov.u32 %r1, %tid.x; shr.u32 %r3, %r1, 5; mov.u32 %r5, 0;
    setp.eq.u32 %p2, %r3, WAITS;
    @%p2 bra WAIT;
LOOP:
    add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, %r1;
    @%p3 bra LOOP;
    ret;
WAIT:
    bar.sync 0;
    ret;
"""
# Warp 0 and lanes of warp 1 wait for all live threads of the cluster, which the exit of its other lanes completes.
PARTIAL_EXIT = """
    mov.u32 %r1, %tid.x; mov.u32 %r5, 0;
    setp.lt.u32 %p2, %r1, 48;
    @%p2 bra WAIT;
LOOP:
    add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 30;
    @%p3 bra LOOP;
    ret;
WAIT:
    barrier.cluster.arrive; barrier.cluster.wait;
    ret;
"""
CLUSTER = """
    mov.u32 %r1, %cluster_ctarank; mov.u32 %r5, 0;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra LAST;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ret;
LAST:
    add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 30;
    @%p3 bra LAST;
    barrier.cluster.arrive.aligned;
    ret;
"""
# Lanes of one warp wait for others of it: all of its paths block in turn.
PARTED = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 16; mbarrier.init.shared.b64 [%r2+8], 16;
READY:
    bar.sync 0; setp.lt.u32 %p2, %r1, 16;
    @%p2 bra FIRST;
    mbarrier.arrive.shared.b64 %d5, [%r2];
SECOND_WAITS:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2+8], 0;
    @!%p4 bra SECOND_WAITS;
    bra END;
FIRST:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0;
    @!%p4 bra FIRST;
    mbarrier.arrive.shared.b64 %d5, [%r2+8];
END:
    ret;
"""
# The phase that warp 1 waits for is long over when what the core did is told: it arrives for the next ones as well.
SEVERAL_PHASES = HANDSHAKE.replace("[%r2], 32", "[%r2], 1").replace(
    "ARRIVE", "setp.ne.u32 %p5, %r1, 0; @%p5 bra OTHERS;" + 2 * "mbarrier.arrive.shared.b64 _, [%r2];" + "OTHERS:"
)
RACE = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic; mov.u32 %r5, 0;
LOOP:
    add.u32 %r5, %r5, 1; shr.u32 %r3, %r1, 5; mul.lo.u32 %r3, %r3, 36;
    mad.lo.u32 %r4, %r5, %r3, %r2; and.b32 %r4, %r4, -4; st.shared.u32 [%r4], %r5;
    setp.lt.u32 %p3, %r5, 40;
    @%p3 bra LOOP;
AGAIN:
    sub.u32 %r5, %r5, 1; setp.gt.u32 %p3, %r5, 0;
    @%p3 bra AGAIN;
    ret;
"""
PROGRAMS: dict[str, tuple[str, int, dict[str, Any]]] = {  # PTX, bytes of memory, launch
    "arrival": (module(HANDSHAKE.replace("ARRIVE", ARRIVE), parameters=1), 16, {"block": (64, 1, 1)}),
    "hang": (module(HANDSHAKE.replace("ARRIVE", ""), parameters=1), 16, {"block": (64, 1, 1)}),
    "several phases": (module(SEVERAL_PHASES, parameters=1), 16, {"block": (64, 1, 1)}),
    "bulk copies": (module(BULK, parameters=1), 512, {}),
    "exit of the first": (module(EARLY_EXIT.replace("WAITS", "1"), parameters=1), 16, {"block": (64, 1, 1)}),
    "exit of the last": (module(EARLY_EXIT.replace("WAITS", "0"), parameters=1), 16, {"block": (64, 1, 1)}),
    "exit of lanes": (module(PARTIAL_EXIT, parameters=1), 16, {"block": (64, 1, 1)}),
    "cluster": (module(CLUSTER, parameters=1), 16, {"grid": (4, 1, 1), "cluster": (2, 1, 1), "block": (64, 1, 1)}),
    "parted lanes": (module(PARTED, parameters=1), 16, {}),
    "race": (module(RACE, parameters=1), 16, {"block": (64, 1, 1)}),
    "missed phase": (MISSED, 16, {}),
    "time limits": (TIME_OUTS, 16, {"block": (64, 1, 1)}),
}


def of_program(name: str, path: Path, **options: Any) -> list[Event]:
    text, nbytes, facts = PROGRAMS[name]
    arguments = [aligned(np.zeros(nbytes, np.uint8)), *[0] * (text.count(".param .u64") - 1)]
    try:
        launch(text, *arguments, options=Options(trace=path, **options), **facts)
    except EmulatorError:
        pass
    return read(path)


READY = "bar.warp.sync -1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# Both CTAs of a pair copy a box to both, and two lanes of each copy one through a map of their own and store them; warp
# 1 does nothing but wait for all that.
PAIR_OF_CTAS = module(
    f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; mov.u32 %r1, dynamic; mov.u32 %r9, %tid.x;
    mov.u32 %r8, %cluster_ctarank; mov.u16 %h1, 3; mov.u32 %r3, 0; mov.u32 %r5, 0;
    add.s32 %r2, %r1, 1024; mad.lo.s32 %r4, %r8, 2048, %r2; mad.lo.s32 %r6, %r9, 2048, %r2; add.s32 %r6, %r6, 4096;
    mad.lo.s32 %r7, %r8, 32, 0; mad.lo.s32 %r7, %r9, 16, %r7;
    setp.ne.u32 %p1, %r9, 0; setp.gt.u32 %p2, %r9, 1;
    @%p1 bra NEXT;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
NEXT:
    {READY}
    @%p1 bra LANES;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8192;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r4], [%d1, {{0, %r3}}], [%r1], %h1;
LANES:
    @%p2 bra POLL;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%d2, {{0, %r3}}], [%r1];
POLL:
    bar.warp.sync -1;
WAITS:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r1], %r5;
    @!%p4 bra WAITS;
    @%p2 bra AFTER;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3, {{0, %r7}}], [%r6];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
AFTER:
    add.s32 %r3, %r3, 16; xor.b32 %r5, %r5, 1; setp.lt.u32 %p3, %r3, 64;
    @%p3 bra NEXT;
    {READY}
    ret;
    """,
    parameters=3,
)




def of_copies(path: Path, **options: Any) -> list[Event]:
    """100 rows in boxes of 16, the last one partly out of bounds."""
    source, out = (aligned(np.zeros((100, 128), np.uint8)) for _ in range(2))
    places = source.ctypes.data, out.ctypes.data
    maps = [TensorMap(place, "u8", (128, 100), (128,), (128, 16), (1, 1), "128B") for place in places]
    given = Options(trace=path, **options)
    try:
        launch(COPY, *maps, block=(96, 1, 1), dynamic_smem=8192, reachable=(source, out), options=given)
    except EmulatorError:
        assert given.detectors
    return read(path)


def of_pair(path: Path, **options: Any) -> list[Event]:
    """Copies to several CTAs, by one lane and by two."""
    memories = [aligned(np.zeros((64, 128), np.uint8)) for _ in range(3)]
    maps = [TensorMap(x.ctypes.data, "u8", (128, 64), (128,), (128, 16), (1, 1), "128B") for x in memories]
    shape: dict[str, Any] = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (64, 1, 1)}
    given = Options(trace=path, **options)
    launch(PAIR_OF_CTAS, *maps, reachable=memories, dynamic_smem=10240, options=given, **shape)
    return read(path)


def names() -> list[str]:
    """Of all that are frozen: a target of the oracle, or a program."""
    return [*records.names(), *PROGRAMS, "copies", "pair of CTAs"]


def timeline(name: str, schedule: str, path: Path) -> list[Event]:
    """The events of a launch, in a key of `SCHEDULES`."""
    options = SCHEDULES[schedule]
    if name in PROGRAMS:
        return of_program(name, path, **options)
    if name in records.names():
        return of_target(name, path, **options)
    return (of_copies if name == "copies" else of_pair)(path, **options)


def digest(events: list[Event]) -> str:
    return hashlib.sha256(json.dumps(events).encode()).hexdigest()[:16]


def frozen() -> dict[str, dict[str, str]]:
    """Digests, by name and schedule."""
    return json.loads((DATA / "digests.json").read_text())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        digests = {n: {s: digest(timeline(n, s, Path(folder) / "trace")) for s in SCHEDULES} for n in names()}
    (DATA / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
