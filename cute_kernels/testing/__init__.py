"""For tests of CuTe DSL kernels without a GPU: emulation under a schedule, data, comparison, hypothesis strategies.

The pytest plugin `cute_kernels.pytest_plugin` adds the fixture ``emulated`` and the marker ``schedules``. Needs the
extra ``testing``; without it, importing this package raises `cute_kernels.common.extras.MissingExtra`.
"""

from cute_kernels.common import extras

extras.require("testing", "cute_kernels.testing")  # before the modules below import it

from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.testing import ptx, strategies
from cute_kernels.testing.compare import assert_matches
from cute_kernels.testing.data import POISON, exact, poisoned, varied
from cute_kernels.testing.emulation import assert_certified, emulation, schedules_for

__all__ = [
    "POISON", "Schedule", "assert_certified", "assert_matches", "emulation", "exact", "poisoned", "ptx",
    "schedules_for", "strategies", "varied",
]
