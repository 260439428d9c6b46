"""Which versions of CuTe DSL are supported, and which one is installed."""

from __future__ import annotations

import contextlib
import importlib.metadata

DISTRIBUTION = "nvidia-cutlass-dsl"

KERNEL_VERSIONS = ("4.8.0", "4.8.1")
"""Versions that the kernels of this package are tested with, oldest first: ``make dsl-versions``."""

EMULATOR_VERSIONS = ("4.6.0", "4.6.1", "4.6.2", "4.6.3", "4.7.0", "4.7.1", *KERNEL_VERSIONS)
"""Versions whose programs the emulator is tested with, likewise."""

_PARTS = tuple(f"{DISTRIBUTION}-libs-{part}" for part in ("base", "core", "cu12", "cu13"))


class UnsupportedVersion(ImportError):
    """A version of CuTe DSL that is not tested, or parts of several."""


def require(versions: tuple[str, ...] = KERNEL_VERSIONS) -> None:
    """Imports CuTe DSL and checks its version. An untested version might compile a kernel to something else.

    Args:
        versions: those allowed, `KERNEL_VERSIONS` or `EMULATOR_VERSIONS`.

    Raises:
        ModuleNotFoundError: CuTe DSL is not installed.
        UnsupportedVersion: it has another version, or its distributions differ in theirs.
    """
    install = f"pip install '{DISTRIBUTION}=={KERNEL_VERSIONS[-1]}'"
    try:
        import cutlass
    except ModuleNotFoundError as error:
        if error.name != "cutlass":
            raise
        raise ModuleNotFoundError(f"CuTe DSL is not installed: {install}", name="cutlass") from error
    found = getattr(cutlass, "__version__", "of unknown version")
    if found not in versions:
        raise UnsupportedVersion(
            f"CuTe DSL ({DISTRIBUTION}) {found} is installed; allowed are the tested versions "
            f"{', '.join(versions)}: {install}"
        )
    for name in _PARTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            part = importlib.metadata.version(name)
            if part != found:
                forced = install.replace("install", "install --force-reinstall")
                raise UnsupportedVersion(f"{name} {part} is installed beside CuTe DSL {found}: {forced}")
