"""The compiled core, loaded for the instruction set of this processor."""

import ctypes
import functools
import os
from pathlib import Path

from . import build, layout

#: Environment variable that names another variant (`build.VARIANTS`) than the processor's best.
VARIABLE = "CUTE_KERNELS_CORE"
_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def library() -> ctypes.CDLL:
    """The core for this processor, see `load`."""
    return load(variant())


def load(name: str) -> ctypes.CDLL:
    """The core of a variant, with the types of its functions; compiled first if its sources have changed. Raises
    CoreNotBuilt: see `build.library`."""
    loaded = ctypes.CDLL(str(build.library(name)))
    for name, (result, *arguments) in layout.FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@functools.cache
def address(name: str) -> int:
    """Address of an exported function, for tables of functions."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value


def variant() -> str:
    """The last variant whose instructions this processor has, or the one that the environment names. Raises ValueError:
    it names one that does not exist, or that the processor has not all instructions of."""
    named = os.environ.get(VARIABLE)
    if not named:  # an empty value is how a shell's `VARIABLE= command` takes one back
        return usable()[-1]
    if named not in build.variants():
        raise ValueError(f"{VARIABLE}={named!r} is no variant of the core; there are {', '.join(build.variants())}")
    if named not in usable():
        raise ValueError(f"{VARIABLE}={named!r}; this processor executes {', '.join(usable())}")
    return named


def usable() -> list[str]:
    """Variants whose instructions this processor has, the best one last."""
    return [name for name, (_, needed) in build.variants().items() if _processor().issuperset(needed)]


@functools.cache
def _processor() -> frozenset[str]:
    """Extensions of the instruction set, as Linux names them; none where it does not tell (no /proc)."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
