"""Which back end runs the warps of a launch.

Bytecode is lowered from PTX as Python source is, takes about as long to make, and runs faster. So a launch is Python's
only where it asks for it, or where bytecode cannot do what is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cute_kernels.emulator.decode import Kernel
from cute_kernels.emulator.flow import Flow
from cute_kernels.emulator.native_translate import NativeLaunch, NativeTranslation, NativeWarp, translate_native
from cute_kernels.emulator.translate import PythonWarp, Translation, translate

if TYPE_CHECKING:
    from cute_kernels.emulator.options import Options
    from cute_kernels.emulator.warp import Warp


class Execution:
    """The code of one launch.

    Args:
        ptx, kernel, block: as for `translate.translate`.
        options: ``native`` False for Python; else bytecode where that is possible.
    """

    def __init__(self, ptx: str, kernel: str | None, block: tuple[int, int, int], options: Options) -> None:
        key = (ptx, kernel, block, options.detectors, options.looks_for("registers"))
        self._native: NativeLaunch | None = None
        self._python: Translation | None = None
        if options.native is not False:
            self._native = NativeLaunch(translate_native(*key))
        else:
            self._python = translate(*key)

    @property
    def flow(self) -> Flow:
        return self._any.flow

    @property
    def kernel(self) -> Kernel:
        return self._any.kernel

    @property
    def static_shared(self) -> int:
        """Bytes of static shared variables."""
        return self._any.static_shared

    @property
    def native(self) -> bool:
        """Whether warps run as bytecode."""
        return self._native is not None

    @property
    def _any(self) -> Translation | NativeTranslation:
        return self._native.translation if self._native is not None else self._python

    def start(self, warp: Warp) -> PythonWarp | NativeWarp:
        """The execution of one warp, before its first instruction."""
        return self._native.start(warp) if self._native is not None else PythonWarp(self._python, warp)
