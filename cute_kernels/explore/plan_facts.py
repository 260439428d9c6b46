"""Numbers of a plan: its memory, what the assembler made of it, what the emulator counts."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cute_kernels.operations import compile
from cute_kernels.plan import Plan, predict
from cute_kernels.plan.base import Prediction
from cute_kernels.plan.config_codec import spell

if TYPE_CHECKING:
    from cute_kernels.emulator import Report
    from cute_kernels.emulator.captured_launch import CapturedLaunch

Facts = Mapping[str, "float | str"]


def planned(plan: Plan) -> Facts:
    """The rows of `Plan.describe` and the grid."""
    return {**dict(plan.describe()), "CTAs": math.prod(plan.grid), "cluster": str(plan.cluster)}


def described(plan: Plan) -> list[tuple[str, str]]:
    """Rows of names and values that say how a plan runs: kernels, memory, grids, configuration and modelled time."""
    config = ", ".join(f"{name}={spell(value)}" for name, value in dataclasses.asdict(plan.config).items())
    single = len(plan.launches) == 1
    grids = [
        ("grid, cluster" if single else f"{part.operation}: grid, cluster", f"{part.grid}, {part.cluster}")
        for part in plan.launches
    ]
    rows = [("runs", plan.runs), *plan.describe(), *grids, ("config", config)]
    if (prediction := predict(plan)) is not None:
        rows += [("time", str(prediction)), ("", prediction.caveat)]
    return rows


def tiles_of(plan: Plan) -> int:
    """Tiles of the kernel of a plan that has the most."""
    return max(getattr(part, "tiles", 1) for part in plan.launches)


def modelled(plan: Plan) -> Facts:
    """Microseconds of the launch and of its parts; empty where no model knows the kernel. docs/model.md"""
    prediction = predict(plan)
    if prediction is None:
        return {}
    ends = {"microseconds, least": prediction.least, "microseconds, most": prediction.most}
    return {"microseconds": prediction.microseconds, **ends, **prediction.parts}


def caveats(predictions: Iterable[Prediction | None]) -> list[str]:
    """Known errors of modelled times, a sentence or two for each model that gave one."""
    return list(dict.fromkeys(prediction.caveat for prediction in predictions if prediction is not None))


def assembled(plan: Plan) -> Facts:
    """Registers, stack and static shared memory, from a compilation. Raises MissingExtra: the tool that reads them is
    not installed."""
    resources = compile.compile_plan(plan, emulated=True).resources
    return {
        "registers per thread": resources.registers,
        "stack bytes (spills)": resources.stack_bytes,
        "local bytes": resources.local_bytes,
    }


_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)
"""Opcode, without modifiers, in a line of the disassembler, behind an address and perhaps a predicate."""


def instruction_mix(plan: Plan) -> Facts:
    """Instructions in the machine code by opcode without its modifiers, and all of them: a count of text, not of time.
    Raises MissingExtra: the disassembler is not installed."""
    opcodes = collections.Counter(_OPCODE.findall(compile.disassemble(compile.compile_plan(plan, emulated=True).cubin)))
    return {"all": opcodes.total(), **dict(sorted(opcodes.items(), key=lambda item: (-item[1], item[0])))}


COUNTED = {
    "shared: TMA fill, wavefronts": ("wavefronts", ("tma.load", "bulk.load")),
    "shared: MMA operand reads, wavefronts": ("operand_wavefronts", ("mma",)),
    "shared: loads, wavefronts": ("wavefronts", ("ld.shared", "ldmatrix.shared")),
    "shared: stores, wavefronts": ("wavefronts", ("st.shared", "stmatrix.shared")),
    "shared: TMA stores, wavefronts": ("wavefronts", ("tma.store", "bulk.store")),
    "shared: bank conflicts": ("bank_conflicts", ("",)),
    "global loads, requests": ("requests", ("ld.global",)),
    "global loads, 128 B lines": ("lines", ("ld.global",)),
    "global stores, requests": ("requests", ("st.global",)),
    "global stores, 128 B lines": ("lines", ("st.global",)),
    "tensor memory: loads": ("instructions", ("tmem.ld",)),
    "MMA instructions": ("instructions", ("mma",)),
    "TMA loads": ("instructions", ("tma.load",)),
    "L2 bytes read": ("l2_bytes_read", ("",)),
    "L2 bytes written": ("l2_bytes_written", ("",)),
}
"""Counts of `Report.units` that are shown: name -> metric and kinds, as docs/emulator/counters.md lists them."""


def counted(plan: Plan) -> Facts:
    """Warp instructions by role, and the work of each unit, of a whole launch on random operands in the emulator.
    Raises MissingExtra: the emulator is not installed."""
    return counts_of(report for _, report in launched(plan))


def launched(plan: Plan) -> "list[tuple[CapturedLaunch, Report]]":
    """The kernels of a plan, each with what the emulator reports and counts of it on random operands."""
    import cute_kernels.emulator as emulator
    import cute_kernels.operations.registry as registry  # torch and the emulator
    import cute_kernels.operations.runtime.emulated as emulated

    operands = registry.random_operands(plan)
    options = emulator.Options(counters=True, detectors=False)
    found = []
    for part in plan.launches:
        recorded = emulated.recorded(part, operands.of(part), compile.compile_plan(part, emulated=True))
        found.append((recorded, emulated.launch(part, operands.of(part), options)))
    return found


_UNNAMED = re.compile(r"warp \d+")
"""A warp without a name of a role: its index says nothing where another configuration has other warps."""


def counts_of(reports: "Iterable[Report]") -> Facts:
    """Warp instructions by role, and the work of each unit, of launches that ran with counters, added up. Warps without
    a name are called after what they do, e.g. ``TMA load``."""
    roles: dict[str, int] = collections.defaultdict(int)
    units: dict[str, int] = collections.defaultdict(int)
    for report in reports:
        for track, kinds in report.units.instructions.items():
            does = report.units.activities.get(track) or "other warps"
            roles[f"warp instructions: {does if _UNNAMED.fullmatch(track) else track}"] += sum(kinds.values())
        for name, (metric, kinds) in COUNTED.items():
            units[name] += sum(report.units.total(metric, kind) for kind in kinds)
    by_role = sorted(roles.items()) if len(roles) > 1 else ()
    return {"warp instructions": sum(roles.values()), **dict(by_role), **units}
