"""Executes PTX of every chip since sm_80 on a CPU, bit for bit, under a seeded scheduler; knows none of our kernels.

`run` executes a launch, `programs` whole programs. `isa` decodes PTX, `machine` executes it (hot paths in C in `core`),
`races` finds unordered accesses, `observe` counts, `reports` explains errors, `checking` tries other schedules.
Needs the extra ``emulator``; without it, importing this package raises `cute_kernels.common.extras.MissingExtra`.
"""

from cute_kernels.common import extras

extras.require("emulator", "the emulator")  # before the modules below import it

from cute_kernels.emulator.errors import (
    BarrierMisuse,
    EmulatorError,
    GlobalMemoryRace,
    Hang,
    IllegalAccess,
    ProxyFenceMissing,
    Race,
    SharedMemoryRace,
    TensorMemoryRace,
    UnsupportedPTX,
)
from cute_kernels.emulator.machine.launch.run import Report, run
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.machine.state.smem import SYSTEM_BYTES as DYNAMIC_SHARED_BASE
from cute_kernels.emulator.machine.units.copies.tensor_map import Im2colMap, TensorMap
from cute_kernels.emulator.options import Options, current_options, default_options

__all__ = [
    "DYNAMIC_SHARED_BASE", "BarrierMisuse", "EmulatorError", "GlobalMemory", "GlobalMemoryRace", "Hang",
    "IllegalAccess", "Im2colMap", "Options", "ProxyFenceMissing", "Race", "Report", "SharedMemoryRace", "TensorMap",
    "TensorMemoryRace", "UnsupportedPTX", "current_options", "default_options", "run",
]
