"""Everything the emulator can report, each an exception that carries where in the program it happened.

A unit raises with what it knows (addresses, bytes, phases); the engine that executes the instruction adds where:
``error.at(instruction, warp)``.
"""

from collections.abc import Callable
from typing import TypeVar

from cute_kernels.emulator.captured_launch import CapturedLaunch
from cute_kernels.emulator.facts import Facts, Located

_Error = TypeVar("_Error", bound="EmulatorError")


class EmulatorError(RuntimeError):
    """Base class. ``str(error)`` is the unit's message followed by the location, as far as it is known.

    Attributes:
        message: what happened, without the location.
        ptx_line: 1-based line of the PTX text, or None.
        instruction: text of the PTX instruction, or None.
        source: ``"file:line"`` of the DSL source (from ``.loc``), or None.
        warp: the warp that executed it, e.g. ``"CTA 1 warp 3 (epilogue)"``, or None.
        ptx: text of the PTX module that was executed or could not be, or None where no kernel is concerned.
        launch: the launch as the host code made it (`CapturedLaunch`: grid, block, cluster, shared memory, parameters),
            or None where there was none, as in `cute_kernels.emulator.run`.
        launch_number: which launch of a program it is, from 1 on (`cute_kernels.emulator.programs.capture`), or None.
        address: the global address that is not accessible, or None.
        kind: of fault, a name in the table of `cute_kernels.emulator.reports.kinds`.
        kernel: name of the kernel's entry, or None where the text has one.
        facts: what is known beside the message.
    """

    kind = "fault"

    ptx: str | None = None
    launch: CapturedLaunch | None = None
    launch_number: int | None = None
    address: int | None = None
    kernel: str | None = None
    source: str | None = None
    warp: str | None = None

    def __init__(self, message: str = "", *, ptx_line: int | None = None, instruction: str | None = None) -> None:
        super().__init__(message)
        self.message, self.ptx_line, self.instruction = message, ptx_line, instruction
        self.facts = Facts()

    def know(self: _Error, kind: str = "", *notes: str, **facts: object) -> _Error:
        """Adds the kind of fault and what is known of it, fields of `Facts`; returns the same error, to raise."""
        self.kind = kind or self.kind
        self.facts.notes += notes
        for name, value in facts.items():
            setattr(self.facts, name, value)
        return self

    def at(self: _Error, instruction: Located | None, warp: str | None = None) -> _Error:
        """Fills in whatever is not known yet of where it happened; the innermost place wins.

        Args:
            instruction: None: it is not known.
            warp: its label.

        Returns:
            The same error, to raise.
        """
        if instruction is not None:
            self.ptx_line = self.ptx_line if self.ptx_line is not None else instruction.line
            self.instruction = self.instruction or instruction.text
            self.source = self.source or instruction.source or None
        self.warp = self.warp or warp
        return self

    def attach(
        self, ptx: str | None, launch: CapturedLaunch | None = None, number: int | None = None,
        kernel: str | None = None,
    ) -> None:
        """Fills in whatever is not known yet of the kernel's text, name and launch."""
        self.ptx = self.ptx if self.ptx is not None else ptx
        self.kernel = self.kernel or kernel
        self.launch = self.launch or launch
        self.launch_number = self.launch_number or number

    def freed(self, shape: str) -> None:
        """Says that the address was one of a tensor that has been freed, of such a type and shape."""
        access = self.facts.sentence.partition(" is outside of all arrays")[0]
        self.message += f"; the address was in a tensor {shape}, which has been freed"
        self.know("freed-memory", sentence=f"{access} is in a tensor {shape} that has been freed")

    def on_the_host(self, owner: str) -> None:
        """Says that the address was one of memory of the host."""
        access = self.facts.sentence.partition(" is outside of all arrays")[0]
        self.message += f"; the address is in a {owner}, which a GPU cannot access"
        self.know("host-memory", sentence=f"{access} is in a {owner}, which a GPU cannot access")

    def launch_name(self) -> str:
        """E.g. ``"launch 2, kernel k"``; empty without a launch."""
        if self.launch is None:
            return ""
        number = f"launch {self.launch_number}, " if self.launch_number else ""
        return f"{number}kernel {self.launch.kernel_name}"

    def __str__(self) -> str:
        place = ""
        if self.ptx_line is not None:
            place = f"at PTX line {self.ptx_line}"
            if self.instruction:
                place += f" `{self.instruction.strip()}`"
        if self.source:
            place += f" ({self.source})" if place else f"at {self.source}"
        if self.warp:
            place += f", {self.warp}" if place else f"in {self.warp}"
        return f"{self.message} {place}" if place else self.message


class UnsupportedPTX(EmulatorError):
    """An opcode, qualifier, descriptor mode or layout that the emulator does not implement."""

    kind = "unsupported"


class UnsupportedOperation(UnsupportedPTX, NotImplementedError):
    """Something else of a program that the emulator does not do, e.g. tensor operations in a CUDA graph."""


class IllegalAccess(EmulatorError):
    """Memory used against the rules: out of bounds, misaligned, unregistered, uninitialised, a foreign TMEM lane."""

    kind = "illegal-access"


class ProxyFenceMissing(EmulatorError):
    """The async proxy reads shared memory that was written through the generic proxy without fence.proxy.async.

    Or, with `Options.strict`, it writes what was read or written so.
    """

    kind = "proxy-fence"


class Race(EmulatorError):
    """Two accesses to the same memory, one of them a write, that no synchronisation orders: base class."""

    kind = "race"


class SharedMemoryRace(Race):
    """A race in shared memory, an asynchronous operation that is not known to be complete included."""

    kind = "shared-race"


class TensorMemoryRace(Race):
    """A race in tensor memory: an operation is not known to be complete where another one follows."""

    kind = "tensor-race"


class GlobalMemoryRace(Race):
    """A race in global memory, between threads of one cluster or between clusters."""

    kind = "global-race"


class BarrierMisuse(EmulatorError):
    """An mbarrier used against its protocol: uninitialised, more arrivals or bytes than its phase expects, ..."""

    kind = "barrier-misuse"


class Hang(EmulatorError):
    """No warp can run and no asynchronous work is left.

    Attributes:
        report: one paragraph per warp: what it waits for and why that does not come.
    """

    kind = "hang"

    def __init__(self, message: str = "", report: str = "") -> None:
        super().__init__(f"{message}\n{report}" if report else message)
        self.report = report


def raising(error: EmulatorError) -> None:
    """Raises a detector's report, as is done where nobody wants to go on."""
    raise error


FAULT, REFUSED = 3, 4
"""Exit statuses of commands beside 0, a program's own ones, and argparse's 2."""


def exit_status(error: EmulatorError) -> int:
    """Exit status of a command that ends with an error of the emulator."""
    return REFUSED if isinstance(error, UnsupportedPTX) else FAULT


def attaching(
    going_on: Callable[[EmulatorError], bool] | None, launch: CapturedLaunch, number: int, ptx: str | None = None
) -> Callable[[EmulatorError], bool] | None:
    """`Options.going_on` of one launch (``ptx``: of another text), whose reports carry it."""
    if going_on is None:
        return None

    def attached(error: EmulatorError) -> bool:
        error.attach(ptx if ptx is not None else launch.ptx, launch, number)
        return going_on(error)

    return attached


def error_behind(error: BaseException) -> EmulatorError | None:
    """The emulator's error that an exception is, or was raised from or while handling; None if there is none."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, EmulatorError):
            return current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return None
