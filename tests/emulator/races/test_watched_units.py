"""Faults of synchronisation in a whole kernel.

It is a small pipeline of two CTAs: a producer loads, a consumer changes what was loaded and stores it, and barriers of
both CTAs stand between them. What synchronises them is weakened, dropped or misdirected, at one place at a time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.machine.units.copies.tensor_map import TensorMap
from cute_kernels.testing.ptx import aligned, module
from tests.emulator.ptx_launch import launch
from tests.nightly import NIGHTLY

ROUNDS, STAGES, ROWS = 8, 2, 16
RANKS = "%r3", "%r26"  # registers: of the own CTA, of the other
BOX = 128 * ROWS
FULL, EMPTY, SIGNAL, BUFFER = 0, 16, 32, 1024

#: What stands at each place of the kernel: the first is right, others may be.
CHOICES = {
    "init_fence": ("fence.mbarrier_init.release.cluster;", ""),
    "start": ("arrive.aligned", "arrive.relaxed.aligned"),
    "empty_order": ("acquire.cluster.", "", "relaxed.cluster.", "acquire.cta."),
    "empty_target": ("own", "other", "both"),
    "free_order": ("release.cluster.", "", "relaxed.cluster.", "release.cta."),
    "free_fence": ("", "fence.acq_rel.cluster;", "fence.acq_rel.cta;"),
    "after_wait": ("", "fence.acq_rel.cluster;"),
    "expected": (str(BOX), str(BOX - 16), str(BOX + 16)),
    "load_row": ("0", "5"),
    "full_order": ("", "relaxed.cluster.", "acquire.cluster."),
    "full_wait": (True, False),
    "empty_wait": (True, False),
    "read": (True, False),
    "write": (True, False),
    "before_fence": ("bar.warp.sync -1;", ""),
    "proxy": ("fence.proxy.async.shared::cta;", "", "fence.proxy.async.global;"),
    "after_fence": ("bar.warp.sync -1;", ""),
    "store_row": ("own", "same"),
    "commit": (True, False),
    "group_wait": ("cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group.read 1;", "",
                   "cp.async.bulk.wait_group 0;"),
    "after_store": ("bar.warp.sync -1;", ""),
    "drain": ("cp.async.bulk.wait_group 0;", ""),
    "signal": ("own", "both", "none"),
    "signal_wait": (True, False),
    "signal_order": ("acquire.cluster.", "", "relaxed.cluster."),
    "end": (True, False),
}  # fmt: skip


#: Places outside the loop.
ONCE = {"init_fence", "start", "drain", "end"}
#: From this round on a program may differ: the core has executed everything by then.
LATE = 5


@dataclass(frozen=True)
class Program:
    """One choice per place; ``late``: what is chosen instead of the first is in the loop only from round `LATE` on."""

    choices: tuple[tuple[str, Any], ...]
    late: bool = False

    def __getitem__(self, place: str) -> Any:
        return dict(self.choices).get(place, CHOICES[place][0])

    def counts(self) -> tuple[int, int]:
        """Arrivals that a phase of the barriers of free stages, and of those of commits, needs."""
        both = [0 if self.late else int(self[place] == "both") for place in ("empty_target", "signal")]
        return 1 + both[0], 1 + both[1]

    def text(self) -> str:
        """The kernel: p0 and p1 are tensor maps of source and output."""
        numbers = itertools.count()

        def at(place: str, render: Callable[[Any], str] = str) -> str:
            """What stands at a place of the loop."""
            first, choice = CHOICES[place][0], self[place]
            if choice == first or not self.late:
                return render(choice)
            n = next(numbers)
            return f"@!%p20 bra OTHER{n};\n{render(first)}\nbra JOIN{n};\nOTHER{n}:\n{render(choice)}\nJOIN{n}:"

        def wait(place: str, order: str, address: str, parity: str) -> str:
            def loop(chosen: str) -> str:
                label = f"WAIT{next(numbers)}"
                test = f"mbarrier.try_wait.parity.{chosen}shared::cta.b64 %p9, [{address}], {parity};"
                return f"{label}:\n{test}\n@!%p9 bra {label};"

            return at(place, lambda waits: at(order, loop) if waits else "")

        def free(target: str) -> str:
            def arrive(order: str) -> str:
                return f"mbarrier.arrive.{order}shared::cluster.b64 _, [%r25];"

            own, other = (f"mapa.shared::cluster.u32 %r25, %r14, {rank}; {at('free_order', arrive)}" for rank in RANKS)
            return {"own": own, "other": other, "both": f"{own}\n{other}"}[target]

        frees, signals = self.counts()
        commits = {
            "own": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r15];",
            "both": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
            "[%r15], %h1;",
            "none": "mbarrier.arrive.shared.b64 _, [%r15];",
        }
        load = "ld.shared.v4.u32 {%r21, %r22, %r23, %r24}, [%r20];"
        store = "st.shared.v2.u32 [%r20+8], {%r21, %r22};"
        return module(
            f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, dynamic; mov.u32 %r2, %tid.x;
    mov.u32 %r3, %cluster_ctarank; shr.u32 %r4, %r2, 5; and.b32 %r5, %r2, 31; mov.u16 %h1, 3; xor.b32 %r26, %r3, 1;
    setp.eq.u32 %p1, %r5, 0; setp.ne.u32 %p2, %r2, 0; mov.u32 %r21, 7; mov.u32 %r22, 8;
    @%p2 bra READY;
    mbarrier.init.shared.b64 [%r1+{FULL}], 1; mbarrier.init.shared.b64 [%r1+{FULL + 8}], 1;
    mbarrier.init.shared.b64 [%r1+{EMPTY}], {frees}; mbarrier.init.shared.b64 [%r1+{EMPTY + 8}], {frees};
    mbarrier.init.shared.b64 [%r1+{SIGNAL}], {signals}; mbarrier.init.shared.b64 [%r1+{SIGNAL + 8}], {signals};
    {self["init_fence"]}
READY:
    bar.warp.sync -1;
    barrier.cluster.{self["start"]}; barrier.cluster.wait.aligned;
    mov.u32 %r7, 0; setp.eq.u32 %p3, %r4, 0;
NEXT:
    setp.lt.u32 %p20, %r7, {LATE};
    and.b32 %r8, %r7, 1; shr.u32 %r9, %r7, 1; and.b32 %r9, %r9, 1; xor.b32 %r10, %r9, 1;
    shl.b32 %r12, %r8, 3; add.s32 %r13, %r1, %r12; add.s32 %r14, %r13, {EMPTY}; add.s32 %r15, %r13, {SIGNAL};
    mul.lo.s32 %r16, %r8, {BOX}; add.s32 %r16, %r16, %r1; add.s32 %r16, %r16, {BUFFER};
    mul.lo.s32 %r17, %r3, {ROUNDS}; add.s32 %r17, %r17, %r7; mul.lo.s32 %r17, %r17, {ROWS};
    @!%p3 bra CONSUME;
    @!%p1 bra AFTER;
    {wait("empty_wait", "empty_order", "%r14", "%r10")}
    {at("after_wait")}
    {at("expected", lambda nbytes: f"mov.u32 %r28, {nbytes};")}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r13], %r28;
    {at("load_row", lambda row: f"add.s32 %r19, %r17, {row};")}
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r16], [%d1, {{0, %r19}}], [%r13];
    {at("signal", lambda how: commits[how])}
    bra AFTER;
CONSUME:
    {wait("full_wait", "full_order", "%r13", "%r9")}
    {wait("signal_wait", "signal_order", "%r15", "%r9")}
    mad.lo.s32 %r20, %r5, 16, %r16;
    {at("read", lambda reads: load if reads else "")}
    add.s32 %r21, %r21, 1;
    {at("write", lambda writes: store if writes else "")}
    {at("before_fence")} {at("proxy")} {at("after_fence")}
    @!%p1 bra STORED;
    {at("store_row", lambda row: "mov.u32 %r18, %r17;" if row == "own" else f"mul.lo.s32 %r18, %r7, {ROWS};")}
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {{0, %r18}}], [%r16];
    {at("commit", lambda commits_: "cp.async.bulk.commit_group;" if commits_ else "")} {at("group_wait")}
STORED:
    {at("after_store")}
    @!%p1 bra AFTER;
    {at("free_fence")}
    {at("empty_target", free)}
AFTER:
    bar.warp.sync -1;
    add.s32 %r7, %r7, 1; setp.lt.u32 %p8, %r7, {ROUNDS};
    @%p8 bra NEXT;
    {self["drain"]}
    {"barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if self["end"] else ""}
    ret;
    """
        )


def run(program: Program) -> tuple[str, np.ndarray]:
    """(error in words, or ""; what was stored)."""
    source = aligned(np.arange(2 * (ROUNDS + 1) * BOX, dtype=np.uint32).astype(np.uint8).reshape(-1, 128), 1024)
    out = aligned(np.zeros_like(source), 1024)
    maps = [
        TensorMap(array.ctypes.data, "u8", (128, len(array)), (128,), (128, ROWS), (1, 1), "128B")
        for array in (source, out)
    ]
    try:
        launch(
            program.text(), *maps, grid=(2, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1), dynamic_smem=8192,
            reachable=(source, out),
            hardware="faulty programs, and commits of tensor memory that is not allocated",
        )  # fmt: skip
    except EmulatorError as caught:
        return f"{type(caught).__name__}: {caught}", out
    return "", out


def faulty(late: bool = False, **choices: Any) -> Program:
    return Program(tuple(choices.items()), late)


def single_faults(late: bool) -> list[Program]:
    """Every choice but the right one, alone; by day at places that have every kind of error."""
    places = CHOICES if NIGHTLY else ("empty_target", "free_order", "expected", "proxy", "store_row", "signal_wait")
    return [
        faulty(late, **{place: choice}) for place in places for choice in CHOICES[place][1:]
        if not (late and place in ONCE)
    ]  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
def test_single_faults(late: bool) -> None:
    """In operations that are repeated as well as in the first."""
    found = Counter(run(program)[0].split(":")[0] for program in single_faults(late))
    kinds = {"", "SharedMemoryRace", "GlobalMemoryRace", "ProxyFenceMissing", "BarrierMisuse", "IllegalAccess", "Hang"}
    assert kinds - {"IllegalAccess" if late else ""} <= found.keys(), found


def test_a_sound_program_ends() -> None:
    error, out = run(faulty())
    assert not error
    expected = np.arange(2 * (ROUNDS + 1) * BOX, dtype=np.uint32).astype(np.uint8).reshape(-1, 128)
    stored = out[: 2 * ROUNDS * ROWS]
    assert (stored != expected[: 2 * ROUNDS * ROWS]).any(axis=1).mean() < 0.5, "the consumer changes 4 rows in 16"
    assert (stored == expected[: 2 * ROUNDS * ROWS]).mean() > 0.8

