"""The units' work as the core counts it, by instruction, named as docs/emulator/counters.md has it."""

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.isa.ptx.program import Instruction
from cute_kernels.emulator.machine.state.warp import WarpState

_METER = np.dtype([(name, np.int64) for name, _ in STRUCTURES["Meter"]._fields_])
_SHARED, _GLOBAL, _CLUSTER, _METERS = (CONSTANTS[f"METER{name}"] for name in ("_SHARED", "_GLOBAL", "_CLUSTER", "S"))


class CoreMeter:
    """The counts of one cluster, of every role its own. ``header``: the core's `Tables`, at the address ``tables``;
    ``instructions``: of the kernel."""

    def __init__(self, header: ctypes.Structure, instructions: Sequence[Instruction]) -> None:
        self._header, self._instructions = header, instructions
        self.tables = ctypes.addressof(header)
        self._counts: dict[str, np.ndarray] = {}

    def counts_for(self, warp: WarpState) -> None:
        if warp.track not in self._counts:
            self._counts[warp.track] = np.zeros((len(self._instructions), _METERS), _METER)
        self._header.meter, self._header.meter_rank = self._counts[warp.track].ctypes.data, warp.cta.rank

    def rows(self) -> Iterator[tuple[str, int, str, dict[str, int]]]:
        """(role, index of the instruction, kind, metrics) of what was executed."""
        for track, counts in self._counts.items():
            for number, which in np.argwhere(counts["requests"] > 0).tolist():
                meter = {name: int(counts[number, which][name]) for name in _METER.names}
                yield track, number, *_row(self._instructions[number].opcode, which, meter)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(index of the instruction, first byte, end) of shared memory that was accessed."""
        for counts in self._counts.values():
            for number, which in np.argwhere(counts["high"] > 0).tolist():
                yield number, int(counts[number, which]["low"]), int(counts[number, which]["high"])


def _name(opcode: str) -> str:
    """Name of an access of the load/store unit, by its opcode."""
    first, second, *_ = (*opcode.removeprefix("multimem.").split("."), "")
    if second == "async" and first in ("cp", "st", "red"):
        return f"{first}.async"
    if first in ("ldmatrix", "stmatrix"):
        return first
    return "atom" if first in ("atom", "red") else "st" if first == "st" else "ld"


def _row(opcode: str, which: int, meter: dict[str, int]) -> tuple[str, dict[str, int]]:
    """Kind and metrics of what was counted."""
    requests, nbytes, moved, name = meter["requests"], meter["bytes"], meter["moved"], _name(opcode)
    if which == _CLUSTER:
        return f"{name}.cluster.{meter['width']}B", {"requests": requests, "bytes": nbytes}
    if which == _SHARED:
        names = {"wavefronts": "wavefronts", "ideal_wavefronts": "ideal", "bank_conflicts": "conflicts"}
        metrics = {metric: meter[word] for metric, word in names.items()}
        return f"{name}.shared.{meter['width']}B", {"requests": requests, "bytes": nbytes, **metrics}
    if which == _GLOBAL:
        writes, reads = name in ("st", "atom"), name != "st"
        l2 = {"l2_bytes_read": moved if reads else 0, "l2_bytes_written": moved if writes else 0}
        pieces = {"sectors": meter["sectors"], "lines": meter["lines"]}
        return f"{name}.global.{meter['width']}B", {"requests": requests, "bytes": nbytes, **pieces, **l2}
    if opcode.startswith(("tcgen05.ld", "tcgen05.st")):
        return f"tmem.{opcode[8:10]}", {"instructions": requests, "bytes": nbytes}
    if opcode.startswith("wgmma"):
        return "mma", {"instructions": requests, "operand_wavefronts": meter["wavefronts"]}
    if opcode.startswith("tcgen05.mma"):
        tensor = {"tmem_bytes_read": meter["tensor_read"], "tmem_bytes_written": meter["tensor_written"]}
        return "mma", {"instructions": requests, "operand_wavefronts": meter["wavefronts"], **tensor}
    # Which of its two state spaces comes first is where a copy goes.
    kind, l2 = ("store", "written") if ".global.shared" in opcode else ("load", "read")
    metrics = {"instructions": requests, "bytes": nbytes, "wavefronts": meter["wavefronts"]}
    metrics |= {f"l2_bytes_{l2}": moved} if moved else {}
    if ".tensor" in opcode:
        return f"tma.{kind}", metrics
    return f"bulk.{kind if '.global' in opcode else 'send'}", metrics
