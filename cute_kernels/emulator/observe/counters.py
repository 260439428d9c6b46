"""Counters of a launch: instructions per warp role and opcode always, the work of each unit on request.

The unit counts (`Options.counters`) have Nsight Compute's meanings, so that a kernel of sm_90a can be compared with a
profile (`bench/counters.py`); docs/emulator/counters.md has the list. Work is attributed to the role of the warp that
issued it. There are no caches: what the load/store unit asks of L1 counts as read from L2.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cute_kernels.emulator.core.library import library
from cute_kernels.emulator.isa.ptx.flow import Flow
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.warp import WarpState
from cute_kernels.emulator.observe import roles
from cute_kernels.emulator.observe.meter import CoreMeter

_Units = dict[str, dict[str, Counter[str]]]


def merge(executions: dict[str, list[int]], more: dict[str, list[int]]) -> None:
    """Adds executions of each basic block per warp role to those of other warps."""
    for role, counts in more.items():
        executions[role] = [a + b for a, b in zip(executions[role], counts)] if role in executions else counts


class Counters:
    """Sums executions of basic blocks; instructions follow because a block is executed as a whole.

    An instruction whose guard is false counts: it is issued. A wait counts once, however often it is retried.
    ``executions``: of each basic block, per warp role.
    """

    def __init__(self, flow: Flow, executions: dict[str, list[int]] | None = None) -> None:
        self._flow = flow
        self._sizes = [block.end - block.start for block in flow.blocks]
        self.executions = executions or {}

    def add(self, warps: Iterable[WarpState]) -> None:
        for warp in warps:
            merge(self.executions, {warp.track: np.asarray(warp.counts[: len(self._sizes)]).tolist()})

    @property
    def by_role(self) -> dict[str, int]:
        """Executions per warp role."""
        return {role: sum(n * size for n, size in zip(counts, self._sizes)) for role, counts in self.executions.items()}

    def of_blocks(self) -> list[int]:
        """Executions of each basic block by all warps."""
        return [sum(counts) for counts in zip(*self.executions.values())] or [0] * len(self._sizes)

    @property
    def total(self) -> int:
        return sum(self.by_role.values())

    def by_opcode(self) -> dict[str, int]:
        """Executions per opcode, most frequent first."""
        result: Counter[str] = Counter()
        for counts in self.executions.values():
            result.update(self._opcodes(counts))
        return dict(result.most_common())

    def by_role_and_class(self) -> dict[str, dict[str, int]]:
        """Executions per role and `instruction_class`, most frequent first."""
        result = {}
        for role, counts in self.executions.items():
            classes: Counter[str] = Counter()
            for opcode, count in self._opcodes(counts).items():
                classes[instruction_class(opcode)] += count
            result[role] = dict(classes.most_common())
        return result

    def activities(self) -> dict[str, str]:
        """Per role what its warps were seen to do, `roles.activity`."""
        return {role: roles.activity(self._opcodes(counts)) for role, counts in self.executions.items()}

    def by_instruction(self) -> dict[int, dict[str, int]]:
        """Executions per role, of each instruction (by its index) that was executed."""
        result: dict[int, dict[str, int]] = {}
        for role, counts in self.executions.items():
            for block, count in zip(self._flow.blocks, counts):
                if count:
                    for index in range(block.start, block.end):
                        result.setdefault(index, {})[role] = count
        return result

    def _opcodes(self, counts: list[int]) -> Counter[str]:
        result: Counter[str] = Counter()
        for opcodes, count in zip(self._flow.opcodes, counts):
            if count:
                for opcode, times in opcodes:
                    result[opcode] += times * count
        return result


_CLASSES = {
    "control": ("bra", "ret", "exit", "call", "trap"),
    "barrier": ("bar", "barrier", "mbarrier", "fence", "membar", "nanosleep", "griddepcontrol"),
    "warp": ("shfl", "vote", "match", "redux", "elect", "activemask"),
    "move": ("mov", "selp", "prmt", "cvta", "mapa", "getctarank", "isspacep"),
    "logic": (
        *("and", "or", "xor", "not", "lop3", "shl", "shr", "shf"),
        *("bfe", "bfi", "bmsk", "popc", "clz", "brev", "bfind"),
    ),
    "convert": ("cvt",),
    "compare": ("setp", "set", "slct"),
    "special": ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt", "div", "rem"),
}
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names}
_ARITHMETIC = ("add", "sub", "mul", "mad", "fma", "min", "max", "abs", "neg", "mul24", "mad24", "sad", "dp4a", "dp2a")
_MEMORY = ("ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix")
_SPACES = ("global", "shared", "local", "param", "const")


def instruction_class(opcode: str) -> str:
    """Class of an instruction by what it asks of the machine.

    ``ld.shared``, ``st.global`` and so on for memory accesses (``ld.generic`` where the opcode names no space),
    ``tma``, ``mma``, ``tmem``, ``barrier``, ``integer``, ``float``, ``convert``, ``compare``, ``logic``, ``move``,
    ``special``, ``warp``, ``control``; ``other`` for the rest.
    """
    parts = opcode.split(".")
    name = parts[0]
    if name in _MEMORY:
        if name.endswith("matrix"):
            return f"{name}.shared"
        spaces = [space for part in parts for space in _SPACES if part.split("::")[0] == space]
        return f"{name}.{spaces[0] if spaces else 'generic'}"
    if name == "tcgen05":
        if parts[1] in ("mma", "ld", "st"):
            return "mma" if parts[1] == "mma" else "tmem"
        return "barrier" if parts[1].startswith(("wait", "fence", "commit")) else "other"
    if name in ("wgmma", "mma"):
        return "mma" if name == "mma" or parts[1] == "mma_async" else "barrier"
    if name == "cp":
        grouping = parts[-1] in ("commit_group", "wait_all") or {"wait_group", "mbarrier"} & set(parts)
        return "barrier" if grouping else "tma" if "bulk" in parts else "cp.async"
    if name in _ARITHMETIC:
        return "float" if parts[-1][0] in "fb" and parts[-1] != "b32" else "integer"
    return _CLASS_OF.get(name, "other")


@dataclass(frozen=True)
class InstructionCounts:
    """Counts of one PTX instruction."""

    ptx_line: int  # 1-based line of the PTX text; 0 for work that belongs to no instruction
    opcode: str  # as written
    executions: dict[str, int]  # warp instructions per role
    # as of `UnitCounts`. Loads or stores of one source line that the emulator performs as one access count for the
    # first of them
    units: dict[str, dict[str, dict[str, int]]]
    # first byte of the shared memory of its CTAs that it accessed, and the one behind the last; not
    # of operands of MMAs, nor of bulk copies out of it into another CTA
    shared: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class UnitCounts:
    """Work per warp role and unit."""

    ctas: int  # CTAs that ran
    instructions: dict[str, dict[str, int]]  # role -> `instruction_class` -> warp instructions
    # role -> kind -> metric -> count. Kinds are ``ld.shared.16B`` (name, space, bytes per lane), ``tma.load``, ``mma``,
    # ``tmem.ld``, ``wait.mbarrier`` and so on; docs/emulator/counters.md lists the metrics of each
    units: dict[str, dict[str, dict[str, int]]]
    activities: dict[str, str] = field(default_factory=dict)  # role -> what its warps do, `roles.activity`
    # the same counts by PTX instruction, in the order of the text; their sums are the ones above
    by_instruction: tuple[InstructionCounts, ...] = field(default=(), repr=False)

    def total(self, metric: str, kind: str = "", role: str | None = None) -> int:
        """Sum of a metric over all kinds that begin with ``kind`` (whole dotted parts), of one role or of all."""
        return sum(
            metrics.get(metric, 0)
            for name, kinds in self.units.items()
            if role in (None, name)
            for key, metrics in kinds.items()
            if not kind or f"{key}.".startswith(f"{kind}.")
        )

    def describe(self) -> str:
        """A line per role and kind, and per role its instructions by class; unnamed warps that do the same together."""
        lines = []
        titles = roles.grouped({role: self.activities.get(role, "") for role in sorted(self.instructions)})
        for title, members in titles.items():
            instructions: Counter[str] = Counter()
            kinds: dict[str, Counter[str]] = defaultdict(Counter)
            for role in members:
                instructions.update(self.instructions[role])
                for kind, metrics in self.units.get(role, {}).items():
                    kinds[kind].update(metrics)
            for kind, metrics in (("instructions", dict(instructions.most_common())), *sorted(kinds.items())):
                counts = (f"{count:,} {metric.replace('_', ' ')}" for metric, count in metrics.items())
                lines.append(f"  {title}: {kind}: {', '.join(counts)}")
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, str, str, int]]:
        """(role, kind, metric, count), in order of role and kind."""
        return [
            (role, kind, metric, count)
            for role, kinds in sorted(self.units.items())
            for kind, metrics in sorted(kinds.items())
            for metric, count in metrics.items()
        ]


def _plain(units: _Units) -> dict[str, dict[str, dict[str, int]]]:
    return {role: {kind: dict(metrics) for kind, metrics in kinds.items()} for role, kinds in units.items()}


class UnitCounters:
    """The work of the units of one cluster, which the core counts, and the waits of its warps. ``warp``: which warp
    runs now; work is attributed to its role; ``core``: where the core counts, from the first warp on."""

    def __init__(self) -> None:
        self.warp: WarpState | None = None
        self.core: CoreMeter | None = None
        self._rows: dict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
        self._spans: dict[int, tuple[int, int]] = {}  # as of `InstructionCounts.shared`, by index

    def merge(self, other: UnitCounters) -> None:
        """Adds what another cluster did."""
        for key, metrics in other._rows.items():
            self._rows[key].update(metrics)
        spans = [(index, *span) for index, span in other._spans.items()]
        if other.core is not None:
            spans += other.core.spans()
            for role, index, kind, metrics in other.core.rows():
                self._rows[role, kind, index].update(metrics)
        for index, first, end in spans:
            known = self._spans.get(index, (first, end))
            self._spans[index] = min(first, known[0]), max(end, known[1])

    def result(self, ctas: int, counters: Counters, instructions: Sequence[Instruction]) -> UnitCounts:
        """The counts of a launch. ``ctas``: how many ran. ``counters``: of all their warps. ``instructions``: of the
        kernel."""
        units: _Units = defaultdict(lambda: defaultdict(Counter))
        places: dict[int, _Units] = defaultdict(lambda: defaultdict(lambda: defaultdict(Counter)))
        for (role, kind, index), metrics in self._rows.items():
            units[role][kind].update(metrics)
            places[index][role][kind].update(metrics)
        executions = counters.by_instruction()
        by_instruction = [
            InstructionCounts(
                instructions[index].line if index >= 0 else 0, instructions[index].opcode if index >= 0 else "",
                executions.get(index, {}), _plain(places[index]) if index in places else {},
                self._spans.get(index, (0, 0)),
            )
            for index in sorted({*executions, *places})
        ]
        classes = counters.by_role_and_class()
        return UnitCounts(ctas, classes, _plain(units), counters.activities(), tuple(by_instruction))

    # --- units of which Python does the work --------------------------------------------------------------------------

    def access(self, how: int, space: str, addresses: np.ndarray, nbytes: int, mask: int) -> None:
        """An access of the running warp to shared or global memory. ``how``: METER_LOAD, METER_STORE or METER_ATOMIC.
        ``space``: "shared" or "global". ``addresses``: int64 [32]. ``nbytes``: by each lane. ``mask``: of the lanes;
        none: nothing is counted."""
        if mask:
            places = np.ascontiguousarray(addresses, np.int64)
            tables, place = self.core.tables, self.warp.code.executing
            library().meter_access(tables, places.ctypes.data, mask, place, space == "shared", how, nbytes)

    # --- called by the scheduler --------------------------------------------------------------------------------------

    def resume(self, warp: WarpState) -> None:
        self.warp = warp

    def give_way(self, warp: WarpState) -> None:
        wait = warp.wait
        if wait is not None:
            barrier = warp.cluster.barriers.name(wait.key[1]) if wait.kind == "mbarrier" else ""
            # All stages of a ring count together: operands_full[2] is operands_full.
            kind = f"wait.{wait.kind}" + (f".{barrier.split('[')[0]}" if barrier else "")
            self._rows[warp.track, kind, warp.code.executing]["times"] += 1
        self.warp = None
