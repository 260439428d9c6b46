"""The launch of a PTX text by which tests of instructions run it: in the emulator, and as `hardware` says on a GPU."""

from __future__ import annotations

import re
from typing import Any

from cute_kernels.emulator import Options, Report
from cute_kernels.emulator.machine.launch.arguments import extents
from cute_kernels.testing import ptx
from tests.emulator import hardware as real

_SHAPE = ("grid", "block", "cluster", "dynamic_smem", "reachable")


def launch(
    text: str, *arguments: ptx.Argument, options: Options | None = None, hardware: str | None = None, **more: Any
) -> Report:
    """Runs the one kernel of ``text`` as `cute_kernels.testing.ptx.launch` does.

    ``hardware``: why a GPU may leave other bytes in the arrays than the emulator, or None if it must not.
    """
    made = ptx.prepare(text, *arguments, **{name: more.pop(name) for name in _SHAPE if name in more})
    arrays = made.arrays if real.MODE else ()
    buffers = [real.Buffer(x.ctypes.data, x.tobytes(), i in made.maps) for i, x in enumerate(arrays)]
    shape: dict[str, Any] = {name: extents(name, getattr(made, name)) for name in ("grid", "block", "cluster")}
    shape |= {"dynamic_smem": made.dynamic_smem, "kernel": more.get("kernel")}
    same = real.Launch(text, **shape, params=made.params, buffers=tuple(buffers))
    with real.compared(same, arrays, leave_out=hardware or _not_comparable(text, options)):
        return made.run(options=options, **more)


def _not_comparable(text: str, options: Options | None) -> str | None:
    if options is not None and options.clusters is not None:
        return "a part of a grid"
    if options is not None and not options.detectors:
        return "without detectors the program may be faulty"
    return "a function whose last bits PTX leaves open" if re.search(r"\.approx|\.full", text) else None
