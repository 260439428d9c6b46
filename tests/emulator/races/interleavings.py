"""Small programs of warps that synchronise: all interleavings by brute force, and the same program as PTX.

A warp is a list of tuples, executed by one lane:

    ("ld", X), ("st", X)            plain accesses to a word of shared memory
    ("arrive", B), ("wait", B, P)   an arrival at an mbarrier; a loop of try_wait for the phase of a parity
    ("look", B, P)                  one test_wait: the next instruction is left out if the phase is complete
    ("fill", X, B)                  arrive.expect_tx and a bulk copy to X that signals
    ("announce", B), ("copy", X, B) expect_tx alone, a copy alone
    ("sync", I, N), ("pass", I, N)  bar.sync and bar.arrive for N warps
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

Step = tuple[str | int, ...]
BYTES = 16
WORD = 1 << 32
_ACCESSES = {"ld": False, "st": True, "land": True}


@dataclass(frozen=True)
class Program:
    """Warps, and of the mbarriers how many arrivals a phase has."""

    warps: tuple[tuple[Step, ...], ...]
    barriers: dict[str, int]


class State(NamedTuple):
    """Of warps and then copies: next step; registers; of barriers (phase, pending, bytes) and (generation, arrived)."""

    pcs: tuple[int, ...]
    registers: tuple[int, ...]
    memory: tuple[tuple[str, int], ...]
    barriers: tuple[tuple[str, tuple[int, int, int]], ...]
    named: tuple[tuple[int, tuple[int, int, int]], ...]
    waits: tuple[int, ...]  # of warps: the generation that they wait for, or -1


@dataclass
class Truth:
    """All that can happen: results (registers of the warps), and whether something may go wrong."""

    results: set[tuple[int, ...]] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)

    @property
    def sound(self) -> bool:
        return not self.wrong and len(self.results) == 1


class Wrong(Exception):
    """A step that must not be."""


class Machine:
    """The interleavings of a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.codes = program, [list(warp) for warp in program.warps]
        self.warps = len(self.codes)
        self.children: dict[tuple[int, int], int] = {}
        for number, warp in enumerate(program.warps):
            for pc, (kind, *args) in enumerate(warp):
                if kind in ("fill", "copy"):
                    self.children[number, pc] = len(self.codes)
                    self.codes.append([("land", args[0], len(self.codes)), ("bytes", args[1])])

    def start(self) -> State:
        idle = len(self.codes) - self.warps
        barriers = tuple((name, (0, count, 0)) for name, count in sorted(self.program.barriers.items()))
        first = tuple(range(1, self.warps + 1))
        return State((0,) * self.warps + (-1,) * idle, first, (), barriers, (), (-1,) * self.warps)

    def next(self, s: State, p: int) -> Step | None:
        return self.codes[p][s.pcs[p]] if 0 <= s.pcs[p] < len(self.codes[p]) else None

    def able(self, s: State, p: int) -> bool:
        step = self.next(s, p)
        if step is None:
            return False
        if step[0] == "wait":
            return dict(s.barriers)[step[1]][0] & 1 != step[2]
        if step[0] == "sync" and s.waits[p] >= 0:
            return dict(s.named)[step[1]][0] > s.waits[p]
        return True

    def step(self, s: State, p: int) -> State:  # noqa: C901 - one case per kind of step
        kind, *args = self.next(s, p)
        pcs, registers, waits = list(s.pcs), list(s.registers), list(s.waits)
        memory, barriers, named = dict(s.memory), dict(s.barriers), dict(s.named)
        pcs[p] += 1
        if kind == "ld":
            registers[p] = (registers[p] * 31 + memory.get(args[0], 0) * 7 + 3) % WORD
        elif kind == "st":
            memory[args[0]] = (registers[p] * 13 + s.pcs[p] * 17 + 5) % WORD
        elif kind == "land":
            memory[args[0]] = args[1]
        elif kind == "look":
            pcs[p] += barriers[args[0]][0] & 1 != args[1]
        elif kind in ("sync", "pass"):
            generation, arrived, wanted = named.get(args[0], (0, 0, args[1]))
            if waits[p] >= 0:
                waits[p] = -1
            else:
                if arrived and wanted != args[1]:
                    raise Wrong("other counts")
                done = arrived + 1 == args[1]
                named[args[0]] = (generation + done, 0 if done else arrived + 1, args[1])
                if kind == "sync":
                    waits[p], pcs[p] = generation, s.pcs[p]
        elif kind != "wait":
            name = args[-1]
            phase, pending, awaited = barriers[name]
            pending -= kind in ("arrive", "fill")
            awaited += {"fill": BYTES, "announce": BYTES, "bytes": -BYTES}.get(kind, 0)
            if pending < 0 or (not pending and awaited < 0):
                raise Wrong("too many arrivals or bytes")
            done = not pending and not awaited
            barriers[name] = (phase + 1, self.program.barriers[name], 0) if done else (phase, pending, awaited)
            if (p, s.pcs[p]) in self.children:
                pcs[self.children[p, s.pcs[p]]] = 0
        parts = (tuple(sorted(each.items())) for each in (memory, barriers, named))
        return State(tuple(pcs), tuple(registers), *parts, tuple(waits))

    def racing(self, s: State, able: list[int]) -> bool:
        ahead = [self.next(s, p) for p in able]
        accesses = [(step[1], _ACCESSES[step[0]]) for step in ahead if step[0] in _ACCESSES]
        return any(a[0] == b[0] and (a[1] or b[1]) for n, a in enumerate(accesses) for b in accesses[:n])

    def explore(self, limit: int) -> Truth | None:
        """Everything that can happen; None: there are more states."""
        truth, first = Truth(), self.start()
        seen, work = {first}, [first]
        while work:
            s = work.pop()
            able = [p for p in range(len(self.codes)) if self.able(s, p)]
            if self.racing(s, able):
                truth.wrong.add("race")
            if not able:
                ended = all(self.next(s, p) is None for p in range(len(self.codes)))
                open_phase = any(awaited for _, (_, _, awaited) in s.barriers)
                if ended and not open_phase:
                    truth.results.add(s.registers)
                else:
                    truth.wrong.add("hang" if not ended else "bytes left")
            for p in able:
                try:
                    new = self.step(s, p)
                except Wrong as wrong:
                    truth.wrong.add(str(wrong))
                    continue
                if new not in seen:
                    seen.add(new)
                    work.append(new)
            if len(seen) > limit:
                return None
        return truth


# --- programs --------------------------------------------------------------------------------------------------------


def ring(rng: random.Random) -> Program:
    """A producer fills stages, consumers read them."""
    tiles, stages, readers = rng.choice([(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 1, 1), (2, 1, 2)])
    apart = rng.random() < 0.3
    load: list[Step] = []
    read: list[list[Step]] = [[] for _ in range(readers)]
    for tile in range(tiles):
        stage, turn = tile % stages, tile // stages & 1
        full, empty, x = f"full{stage}", f"empty{stage}", f"x{stage}"
        fill: list[Step] = [("announce", full), ("copy", x, full), ("arrive", full)] if apart else [("fill", x, full)]
        load += [("wait", empty, turn ^ 1), *fill]
        for each in read:
            each += [("look", full, turn)] if rng.random() < 0.05 else []
            each += [("wait", full, turn), ("ld", x), ("arrive", empty)]
    barriers = {f"full{s}": 1 for s in range(stages)} | {f"empty{s}": readers for s in range(stages)}
    return Program((tuple(load), *map(tuple, read)), barriers)


def hand_over(rng: random.Random) -> Program:
    """Two warps hand a word to and fro by named barriers or by mbarriers."""
    turns, by_name = rng.randint(1, 3), rng.random() < 0.6
    a: list[Step] = []
    b: list[Step] = []
    for turn in range(turns):
        tell, told = (("pass", 1, 2), ("sync", 1, 2)) if by_name else (("arrive", "go"), ("wait", "go", turn & 1))
        back, free = (("pass", 2, 2), ("sync", 2, 2)) if by_name else (("arrive", "ok"), ("wait", "ok", turn & 1))
        a += [("st", "x"), tell, free]
        b += [told, ("ld", "x"), back]
    return Program((tuple(a), tuple(b)), {} if by_name else {"go": 1, "ok": 1})


def meeting(rng: random.Random) -> Program:
    """Warps that exchange words between barriers of all."""
    count, turns = rng.randint(2, 3), rng.randint(1, 2)
    warps = [
        [
            step
            for turn in range(turns)
            for step in (("st", f"x{w}{turn}"), ("sync", 1, count), ("ld", f"x{(w + 1) % count}{turn}"))
        ]
        for w in range(count)
    ]
    return Program(tuple(map(tuple, warps)), {})


def damaged(program: Program, rng: random.Random) -> Program:
    """The program with one step dropped, doubled, moved, or with another number or object."""
    warps = [list(warp) for warp in program.warps]
    warp = rng.choice([each for each in warps if each])
    n = rng.randrange(len(warp))
    kind, *args = warp[n]
    how = rng.choice(["drop", "drop", "double", "swap", "number", "object", "count"])
    barriers = dict(program.barriers)
    if how == "drop":
        del warp[n]
    elif how == "double":
        warp.insert(n, warp[n])
    elif how == "swap" and n:
        warp[n - 1], warp[n] = warp[n], warp[n - 1]
    elif how == "number" and kind in ("wait", "look"):
        warp[n] = (kind, args[0], args[1] ^ 1)
    elif how == "number" and kind in ("sync", "pass"):
        warp[n] = (kind, args[0] % 2 + 1, args[1])
    elif how == "object":
        warp[n] = rng.choice([step for each in warps for step in each if step[0] == kind])
    elif how == "count" and barriers:
        barriers[rng.choice(sorted(barriers))] = rng.choice([1, 2])
    return Program(tuple(map(tuple, warps)), barriers)


def drawn(seed: int) -> Program:
    """A program with up to two mistakes."""
    rng = random.Random(seed)
    program = rng.choice([ring, ring, hand_over, meeting])(rng)
    for _ in range(rng.choice([0, 1, 1, 2])):
        program = damaged(program, rng)
    return program


# --- PTX -------------------------------------------------------------------------------------------------------------


def ptx_of(program: Program, machine: Machine) -> str:
    """Body of a kernel of the same warps; p0: a word per warp, behind 1,024 bytes 16 bytes for each copy."""
    names = sorted({str(step[1]) for warp in program.warps for step in warp if step[0] in ("ld", "st", "fill", "copy")})
    places = {name: f"dynamic+{1024 + BYTES * n}" for n, name in enumerate(names)}
    at = {name: f"dynamic+{8 * n}" for n, name in enumerate(sorted(program.barriers))}
    inits = " ".join(f"mbarrier.init.shared.b64 [{at[name]}], {n};" for name, n in program.barriers.items())
    clear = " ".join(f"st.shared.b32 [{place}], %r9;" for place in places.values())
    lines = [
        "mov.u32 %r1, %tid.x; ld.param.u64 %d0, [p0]; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31; mov.b32 %r9, 0;",
        f"setp.ne.u32 %p1, %r1, 0; @%p1 bra READY; {clear} {inits} fence.proxy.async.shared::cta;",
        "fence.mbarrier_init.release.cluster; READY: bar.sync 0; setp.ne.u32 %p2, %r3, 0; @%p2 bra GONE;",
    ]
    for number, warp in enumerate(program.warps):
        lines.append(f"setp.ne.u32 %p3, %r2, {number}; @%p3 bra W{number}; mov.b32 %r4, {number + 1};")
        for pc, (kind, *args) in enumerate(warp):
            here = f"{number}_{pc}"
            if kind == "ld":
                lines.append(f"ld.shared.u32 %r5, [{places[args[0]]}]; mul.lo.u32 %r5, %r5, 7;")
                lines.append("mad.lo.u32 %r4, %r4, 31, %r5; add.u32 %r4, %r4, 3;")
            elif kind == "st":
                lines.append(f"mul.lo.u32 %r5, %r4, 13; add.u32 %r5, %r5, {pc * 17 + 5};")
                lines.append(f"st.shared.u32 [{places[args[0]]}], %r5;")
            elif kind == "arrive":
                lines.append(f"mbarrier.arrive.shared.b64 _, [{at[args[0]]}];")
            elif kind == "wait":
                look = f"mbarrier.try_wait.parity.shared::cta.b64 %p4, [{at[args[0]]}], {args[1]};"
                lines.append(f"L{here}: {look} @!%p4 bra L{here};")
            elif kind == "look":
                lines.append(f"mbarrier.test_wait.parity.shared::cta.b64 %p5, [{at[args[0]]}], {args[1]};")
                lines.append(f"@%p5 bra S{number}_{pc + 2};")
            elif kind in ("sync", "pass"):
                lines.append(f"bar.{'sync' if kind == 'sync' else 'arrive'} {args[0]}, {32 * args[1]};")
            if kind == "announce":
                lines.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{at[args[0]]}], {BYTES};")
            if kind == "fill":
                lines.append(f"mbarrier.arrive.expect_tx.shared.b64 _, [{at[args[1]]}], {BYTES};")
            if kind in ("fill", "copy"):
                source = 1024 + BYTES * machine.children[number, pc]
                lines.append(f"add.u64 %d1, %d0, {source};")
                lines.append("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                             f"[{places[args[0]]}], [%d1], {BYTES}, [{at[args[1]]}];")  # fmt: skip
            lines.append(f"S{number}_{pc + 1}:")
        lines.append(f"S{number}_{len(warp) + 1}: st.global.u32 [%d0+{4 * number}], %r4; bra GONE; W{number}:")
    return "\n".join([*lines, "GONE: ret;"])
