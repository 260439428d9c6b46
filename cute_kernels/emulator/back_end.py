"""Which back end runs the warps of a launch, and when it changes.

Bytecode is lowered from PTX as Python source is, and takes about as long to make. So a kernel starts in Python and
changes over when it has executed about as many instructions as lowering it again takes: this costs at most twice the
time of the better choice. Both back ends keep the same registers in other places, so running warps are carried over.
The point of the change is counted in instructions, never in time: a launch that replays its seed changes at the same
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cute_kernels.emulator.decode import Kernel
from cute_kernels.emulator.flow import Flow
from cute_kernels.emulator.native_block import NotNative
from cute_kernels.emulator.native_translate import NativeLaunch, NativeTranslation, NativeWarp, translate_native
from cute_kernels.emulator.translate import PythonWarp, Translation, translate

if TYPE_CHECKING:
    from cute_kernels.emulator.options import Options
    from cute_kernels.emulator.sm import Cluster
    from cute_kernels.emulator.warp import Warp

# Measured (docs/emulator/speed.md): lowering takes about 0.2 ms per PTX instruction; Python executes 0.2 instructions
# per microsecond.
_EXECUTIONS = 40
_FIXED = 500
_CHECK = 16  # rounds of the scheduler between two looks at the counts


class Execution:
    """The code of one launch.

    Args:
        ptx, kernel, block: as for `translate.translate`.
        options: ``native`` None to change over, True or False to stay with one back end.
    """

    def __init__(self, ptx: str, kernel: str | None, block: tuple[int, int, int], options: Options) -> None:
        self._key = (ptx, kernel, block, options.detectors, options.looks_for("registers"))
        python_only = options.trace is not None  # a timeline asks for the line that a generator stands at
        self._may_change = options.native is None and not python_only
        self._native: NativeLaunch | None = None
        self._python: Translation | None = None
        self._calls = 0
        if options.native and not python_only:
            self._compile()
        if self._native is None:
            self._python = translate(*self._key)
            self._change_if_hot(())

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
    def python(self) -> Translation:
        """The translation to Python, whether or not it is in use."""
        return self._python or translate(*self._key)

    @property
    def native(self) -> bool:
        """Whether warps run as bytecode now."""
        return self._native is not None

    @property
    def _any(self) -> Translation | NativeTranslation:
        return self._native.translation if self._native is not None else self._python

    def start(self, warp: Warp) -> PythonWarp | NativeWarp:
        """The execution of one warp, before its first instruction."""
        return self._native.start(warp) if self._native is not None else PythonWarp(self._python, warp)

    def consider(self, cluster: Cluster, soon: bool) -> None:
        """Changes to bytecode when it is time. To be called between the slices of the cluster's warps.

        Args:
            cluster: what runs.
            soon: look at the counts now, because a warp has run for long.
        """
        if not self._may_change or self._native is not None:
            return
        if cluster.wgmma.busy:  # its results will go to where Python keeps them
            return
        self._calls += 1
        if soon or self._calls % _CHECK == 0:
            self._change_if_hot([warp for cta in cluster.ctas for warp in cta.warps])

    def finished(self, warps: Iterable[Warp]) -> None:
        """A cluster has run: what it executed in Python counts for later ones and for later launches."""
        if self._may_change and self._native is None:
            self._python.executed[0] += self._executed(warps)

    def _change_if_hot(self, warps: Sequence[Warp]) -> None:
        executed = self._python.executed[0] + self._executed(warps)
        if not self._may_change or executed <= _EXECUTIONS * (len(self.kernel.instructions) + _FIXED):
            return
        self._compile()
        if self._native is not None:
            self._python.executed[0] = executed
            for warp in warps:
                if warp in warp.cluster.running:
                    warp.code = NativeWarp.adopt(self._native, warp, warp.code)

    def _executed(self, warps: Iterable[Warp]) -> int:
        """Warp instructions."""
        sizes = [block.end - block.start for block in self.flow.blocks]
        return sum(count * size for warp in warps for count, size in zip(warp.counts, sizes))

    def _compile(self) -> None:
        try:
            self._native = NativeLaunch(translate_native(*self._key))
        except NotNative:
            self._may_change = False
