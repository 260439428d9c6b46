"""The units' work as the core counted it, by instruction, as rows of `counters.UnitCounters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cute_kernels.emulator.core.layout import CONSTANTS, STRUCTURES
from cute_kernels.emulator.ptx.decode import Instruction

_METER = np.dtype([(name, np.int64) for name, _ in STRUCTURES["Meter"]._fields_])
_SHARED, _GLOBAL, _CLUSTER, _METERS = (CONSTANTS[f"METER{name}"] for name in ("_SHARED", "_GLOBAL", "_CLUSTER", "S"))
_SECTOR_BYTES = 32


class CoreMeter:
    """The counts of one cluster.

    Args:
        instructions: of the kernel.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions
        self._counts: dict[str, np.ndarray] = {}

    def address(self, track: str) -> int:
        """Where the core counts for warps of a role."""
        if track not in self._counts:
            self._counts[track] = np.zeros((len(self._instructions), _METERS), _METER)
        return self._counts[track].ctypes.data

    def rows(self) -> Iterator[tuple[str, int, str, dict[str, int]]]:
        """(role, index of the instruction, kind, metrics) of what was executed."""
        for track, counts in self._counts.items():
            for number, which in np.argwhere(counts["requests"] > 0).tolist():
                meter = {name: int(counts[number, which][name]) for name in _METER.names}
                yield track, number, *_row(self._instructions[number].opcode, which, meter)


def _row(opcode: str, which: int, meter: dict[str, int]) -> tuple[str, dict[str, int]]:
    """Kind and metrics, as the methods of `UnitCounters` name them."""
    requests, nbytes = meter["requests"], meter["bytes"]
    name = "cp.async" if opcode.startswith(("cp.async.ca", "cp.async.cg")) else opcode.partition(".")[0]
    if name not in ("ldmatrix", "stmatrix", "cp.async"):
        name = "st" if opcode.startswith("st") else "ld"
    if which == _CLUSTER:
        return f"{name}.cluster.{meter['width']}B", {"requests": requests, "bytes": nbytes}
    if which == _SHARED:
        names = {"wavefronts": "wavefronts", "ideal_wavefronts": "ideal", "bank_conflicts": "conflicts"}
        metrics = {metric: meter[word] for metric, word in names.items()}
        return f"{name}.shared.{meter['width']}B", {"requests": requests, "bytes": nbytes, **metrics}
    moved = _SECTOR_BYTES * meter["sectors"]
    if which == _GLOBAL:
        l2 = {"l2_bytes_read": 0 if name == "st" else moved, "l2_bytes_written": moved if name == "st" else 0}
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
