"""Whole CuTe DSL programs: their kernels execute in the emulator, their host code and checks run as they are.

    with capture(arch="sm_100a") as session:
        runpy.run_path("program.py", run_name="__main__")
    for launch in session.launches: print(launch.summary())

Inside, everything that CuTe DSL compiles is compiled for ``arch`` with its PTX kept, every launch executes at once, and
torch tensors on "cuda" are host memory (`cute_kernels.emulator.programs.device`). What belongs to the GPU and has
no meaning here is answered: device queries with the facts of ``arch``, times with NaN after one run of what was to be
timed. TVM-FFI calls are made through CuTe DSL's own calls instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from cute_kernels.common import forks, interrupts
from cute_kernels.common.chips import CHIPS, DEFAULT_ARCH, check_arch, runs
from cute_kernels.common.files import NotWritten
from cute_kernels.common.words import counted
from cute_kernels.dsl.programs import compiling_for, context_initialisers
from cute_kernels.emulator.errors import EmulatorError, UnsupportedOperation, attaching
from cute_kernels.emulator.isa.ptx.decode import parse
from cute_kernels.emulator.machine.launch.run import Report
from cute_kernels.emulator.machine.state.gmem import GlobalMemory
from cute_kernels.emulator.observe.roles import of_kernel
from cute_kernels.emulator.options import Options, default_options
from cute_kernels.emulator.programs import host, ptx_files
from cute_kernels.emulator.programs.cuda_graphs import NO_POOL, Graph
from cute_kernels.emulator.programs.device.answers import driver_answers, hardware_info
from cute_kernels.emulator.programs.kept_launches import KeptLaunches
from cute_kernels.emulator.programs.recorded import Recorder, StreamOrder
from cute_kernels.emulator.programs.streams import Streams, answers
from cute_kernels.emulator.programs.threads import ProgramThreads
from cute_kernels.emulator.races.launch_shadow import LaunchShadow
from cute_kernels.emulator.reports.document import launch_facts
from cute_kernels.emulator.reports.sources import short_name

if TYPE_CHECKING:
    import torch

_PATIENCE = 0.1
"""Seconds of waiting for another thread's launch after which signals are looked for."""


@dataclasses.dataclass(frozen=True)
class EmulatedLaunch:
    """A launch that a program made, what it did, and which of the program's launches it is, from 1 on."""

    launch: host.CapturedLaunch
    report: Report
    number: int = 0

    def summary(self) -> str:
        """One line."""
        launch, report = self.launch, self.report
        name, mmas = short_name(launch.ptx, launch.kernel_name), counted(report.mma_instructions, "MMA")
        cluster = "" if launch.cluster == (1, 1, 1) else f", cluster {_shape(launch.cluster)}"
        processes = f", {report.processes} processes" if report.processes > 1 else ""
        if report.one_process:
            processes = f", one process: {report.one_process}"
        return (
            f"{name}: grid {_shape(launch.grid)}, block {_shape(launch.block)}{cluster}, {report.shared_bytes:,} B of "
            f"shared memory; {report.warp_instructions:,} warp instructions, {mmas}, "
            f"{report.seconds:.1f} s{processes}"
        )

    def lines(self, *, counters: bool, certificate: bool) -> list[str]:
        """The summary and, if asked for, what units did and whether the run stands for every schedule."""
        lines = [f"emulated: {self.summary()}"]
        if certificate:
            found = self.report.certificate
            lines += ["no certificate; the launch ran without detectors"] if found is None else found.lines()
            lines[2:] = [f"  {line}" for line in lines[2:]]
        if counters and self.report.units is not None:
            lines.append(self.report.units.describe())
        return lines


def _named(error: EmulatorError) -> str:
    """E.g. ``"launch 2, kernel add"``."""
    full = error.launch.kernel_name if error.launch is not None else ""
    return error.launch_name().replace(full, short_name(error.launch.ptx, full)) if full else error.launch_name()


def _shape(numbers: tuple[int, int, int]) -> str:
    return "x".join(map(str, numbers))


class Session:
    """The launches of a program, made by `capture`, whose arguments these are.

    Attributes:
        launches: those that are complete, in order.
        failures: the errors of those that are not, in order; the program may have caught them.
        traces: files of timelines, of a launch that failed too.
        unwritten: a timeline or a file of ``keep_ptx`` that could not be written, or None.
        threads: those that the program started, whose launches count too.
        streams: those of the program.
    """

    def __init__(
        self,
        arch: str,
        options: Options,
        report: Callable[[EmulatedLaunch], None] | None,
        keep_ptx: str | os.PathLike[str] | None,
        *,
        overlap: bool,
        recorder: Recorder | None,
        roles: Mapping[str, Sequence[str]] | None,
        new_byte: int,
    ) -> None:
        from cute_kernels.emulator.programs.device import cuda_device  # torch is loaded when it is needed

        self.arch, self.options, self.chip = arch, options, CHIPS[arch]
        self.launches: list[EmulatedLaunch] = []
        self.failures: list[EmulatorError] = []
        self.traces: list[Path] = []
        self.unwritten: NotWritten | None = None
        self._report = report
        self._kept = KeptLaunches(keep_ptx) if keep_ptx is not None else None
        self._overlap, self._recorder = overlap, recorder
        self._roles = roles or {}
        self._order = StreamOrder() if overlap or recorder is not None else None
        self._memory = GlobalMemory()
        self._local = threading.local()
        self.streams = Streams()
        worked = self._order.made if self._order is not None else None
        self.device = cuda_device.CudaDevice(self.chip, self.streams, worked)
        self.device.report, self.device.new_byte = self._raced, new_byte
        self._launching = forks.lock()
        self.threads = ProgramThreads(self._inside)

    def facts(self) -> list[dict[str, object]]:
        """`launch_facts` of all launches, in order."""
        done = [(each.number, each.launch, each.report) for each in self.launches]
        failed = [(each.launch_number, each.launch, None) for each in self.failures if each.launch is not None]
        return [
            launch_facts(number, short_name(launch.ptx, launch.kernel_name), launch, report)
            for number, launch, report in sorted(done + failed, key=lambda each: each[0])
        ]

    def total(self) -> str:
        """Number of launches, those that failed, and seconds, in one line."""
        number, seconds = len(self.launches), sum(each.report.seconds for each in self.launches)
        text = f"emulated: {counted(number, 'launch', 'launches')}"
        if not self.failures:
            return f"{text} in {seconds:.1f} s"
        failed = ", ".join(_named(error) for error in self.failures)
        return f"{text} complete in {seconds:.1f} s; {failed} failed"

    def launch(self, launch: host.CapturedLaunch) -> None:
        """Executes a launch, or adds it to the CUDA graph that is being captured; those of several threads in turn."""
        with self._in_turn():
            self._launch(launch)

    def launch_ptx(self, ptx: str | os.PathLike[str], *arguments: object, **shape: object) -> None:
        """Launches a kernel of a PTX text, or of a .ptx or .cu file.

        Args:
            ptx: text, or the path of a file (`pathlib.Path`).
            arguments: one for each parameter, see `ptx_files.captured`.
            shape: ``grid`` and ``block``; ``kernel``, ``cluster``, ``dynamic_smem``, ``cooperative``.

        Raises:
            TypeError, ValueError: arguments that do not fit the kernel; see `ptx_files.read` for files.
            EmulatorError: the kernel is at fault.
        """
        self._local.arguments = {}
        text = ptx if isinstance(ptx, str) else ptx_files.read(ptx, self.arch)
        self.launch(ptx_files.captured(text, {"arguments": arguments, **shape}))

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Waits for the launches of other threads; signals end the waiting."""
        while not self._launching.acquire(timeout=_PATIENCE):
            interrupts.check()
        try:
            yield
        except NotWritten as error:  # the program may catch it
            self.unwritten = self.unwritten or error
            raise
        finally:
            self._launching.release()

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.streams.capture_of(self.streams.current) is not None

    def _check_chip(self, launch: host.CapturedLaunch) -> None:
        """Refuses what the chip does not run; `emulator.run` knows the chip of the PTX, which may be an older one."""
        target, most = parse(launch.ptx).target, self.chip.smem_bytes
        if not runs(target, self.arch):
            raise EmulatorError(
                f"launch of {launch.kernel_name} is illegal: its PTX is for {target}, which {self.arch} does not run"
            )
        if launch.dynamic_smem > most:
            raise EmulatorError(
                f"launch of {launch.kernel_name} is illegal: {launch.dynamic_smem} bytes of dynamic shared memory, of "
                f"which a CTA on {self.arch} has {most} at most"
            )

    def _name_arguments(self, addresses: dict[str, int]) -> None:
        if addresses:  # not a function inside of the kernel
            self._local.arguments = addresses

    def _name(self, address: int, nbytes: int) -> str:
        """The parameters of the function that this thread has called which lie in an allocation, or ""."""
        given = getattr(self._local, "arguments", {})
        return ", ".join(name for name, at in given.items() if address <= at < address + nbytes)

    def _launch(self, launch: host.CapturedLaunch) -> None:
        capture = self.streams.capture_of(launch.stream)
        if capture is not None:
            capture.graph.take(launch)
            return
        with self.device.beside_captures():
            self._launch_now(launch)

    def _launch_now(self, launch: host.CapturedLaunch) -> None:
        regions = dict(self.device.regions())
        self._memory.clear()
        for address, nbytes in regions.items():
            self._memory.register(address, nbytes, self._name(address, nbytes) or "a tensor on the device")
        overlaps = (
            launch.programmatic
            and self._order is not None
            and self._order.directly_follows(regions.items(), launch.stream)
        )
        options = dataclasses.replace(self.options, roles=self._names(launch))
        names = {address: self._name(address, nbytes) for address, nbytes in regions.items()}
        self._execute(launch, self._memory, options, names, overlaps=overlaps, programmatic=overlaps and self._overlap)

    def operation(
        self, launch: host.CapturedLaunch, memory: GlobalMemory, options: Options, *, programmatic: bool, **_: object
    ) -> Report:
        """`host.execute` of an operation of this package with ``backend="emulator"``, whose memory is its tensors."""
        with self._in_turn():
            names = {region.start: region.name for region in memory.regions()}
            return self._execute(launch, memory, options, names, overlaps=False, programmatic=programmatic)

    def _execute(
        self,
        launch: host.CapturedLaunch,
        memory: GlobalMemory,
        options: Options,
        names: dict[int, str],
        *,
        overlaps: bool,
        programmatic: bool,
    ) -> Report:
        """Executes a launch with this memory, whose parts have ``names`` by their addresses."""
        regions = {region.start: region.end - region.start for region in memory.regions()}
        number = self._next_number()
        trace, going_on = self._trace_file(number) or options.trace, options.going_on
        if trace is not None:
            self.traces.append(Path(trace))
        if self._kept is not None:
            self._kept.write(number, launch, outcome="started")
        if self._recorder is not None:
            self._recorder.take(
                launch,
                regions.items(),
                overlaps=overlaps,
                options=options,
                variables=memory.modules.get(launch.ptx),
                names=names,
                shapes=self.device.shape,
            )
        try:
            if memory is self._memory:  # an operation has chosen its chip
                self._check_chip(launch)
            options = dataclasses.replace(options, trace=trace, going_on=attaching(going_on, launch, number))
            report = host.execute(launch, memory, options, programmatic=programmatic)
            self._look_for_races(launch, number)
        except EmulatorError as error:
            if shape := self.device.freed(error.address):
                error.freed(shape)
            if owner := self.device.owner_on_the_host(error.address):
                error.on_the_host(owner)
            if self._order is not None:
                self._order.made("a launch that failed")
            self._failed(number, launch, error)
            raise
        if self._recorder is not None:
            self._recorder.ended(report)
        if self._order is not None:
            self._order.launched(regions.items(), launch.stream)
        if self._kept is not None:
            self._kept.write(number, launch, outcome="complete")
        done = EmulatedLaunch(launch, report, number)
        self.launches.append(done)
        if self._report is not None:
            self._report(done)
        return report

    def _look_for_races(self, launch: host.CapturedLaunch, number: int) -> None:
        """Raises GlobalMemoryRace: the launch that has run may run at the same time as one of another stream."""
        accesses = self._memory.accesses
        if not isinstance(accesses, LaunchShadow):  # not looked for
            return
        spans = [*accesses.accesses(), *accesses.elsewhere]
        race = self.streams.launched(launch, number, spans, self.device.lifetimes())
        if race is not None:
            self._raced(race)

    def _raced(self, race: EmulatorError) -> None:
        """Streams race: raises it, unless the program is to go on."""
        if self.options.going_on is None or not self.options.going_on(race):
            raise race

    def refuse(self, launch: host.CapturedLaunch, error: EmulatorError) -> None:
        """Takes note of a launch that is illegal or not implemented."""
        with self._in_turn():
            self._failed(self._next_number(), launch, error)

    def _failed(self, number: int, launch: host.CapturedLaunch, error: EmulatorError) -> None:
        error.attach(launch.ptx, launch, number)
        self.failures.append(error)
        if self._kept is not None:
            self._kept.write(number, launch, outcome=type(error).__name__, error=str(error))

    def _next_number(self) -> int:
        return len(self.launches) + len(self.failures) + 1

    def _names(self, launch: host.CapturedLaunch) -> tuple[str, ...]:
        return of_kernel(launch.kernel_name, self._roles) or self.options.roles

    def _trace_file(self, number: int) -> Path | None:
        """Every launch has a timeline of its own."""
        if self.options.trace is None or number == 1:
            return self.options.trace
        path = Path(self.options.trace)
        return path.with_name(f"{path.stem}-{number}{path.suffix}")

    @contextlib.contextmanager
    def active(self) -> Iterator[Session]:
        """Redirects CuTe DSL, torch.cuda and what host code asks of the driver."""
        import torch

        from cute_kernels.emulator.programs import call_arguments

        with contextlib.ExitStack() as stack:
            stack.enter_context(compiling_for(self.arch, UnsupportedOperation, self._name_arguments))
            stack.enter_context(self.device.active())
            for target, name, value in self._replacements():
                stack.enter_context(mock.patch.object(target, name, value, create=True))
            stack.enter_context(call_arguments.converting_calls(self._name_arguments))
            if "torch._dynamo" in sys.modules:  # functions that were compiled before run as they are, too
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._recording())
            stack.enter_context(self.threads.active())
            yield self

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """The part of `active` that is per thread, for another thread."""
        with self.device.inside(), self._recording():
            yield

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        interception = host.intercept(self.launch, self.refuse, self.operation)
        with host.recording_runtime(), default_options(self.options), interception:
            yield

    def _replacements(self) -> Iterator[tuple[object, str, object]]:
        import cutlass.testing
        import cutlass.utils
        import torch
        from cuda.bindings import driver, runtime

        session = self

        yield torch, "compile", _uncompiled
        yield torch.nn.Module, "compile", _leave_uncompiled
        graph = type("CUDAGraph", (Graph,), {"session": session})
        for module in (torch.cuda, torch.cuda.graphs):
            yield module, "CUDAGraph", graph
        for module in (torch._C, torch.cuda.graphs):
            yield module, "_cuda_isCurrentStreamCapturing", session.is_capturing
        yield torch.cuda.graphs, "_graph_pool_handle", lambda: NO_POOL
        yield cutlass.testing, "benchmark", _run_once
        yield cutlass.testing, "_benchmark_for_autotune", _run_untimed
        yield importlib.import_module("cutlass.cute.testing"), "benchmark", _run_once
        yield cutlass.utils, "HardwareInfo", lambda *_, **__: hardware_info(session.chip)
        for module, name in context_initialisers():
            yield module, name, lambda device=0: None
        yield from driver_answers(driver, runtime, session.chip)
        yield from answers(session.streams, driver, runtime)


def _uncompiled(model: object = None, *_: object, backend: object = "inductor", **options: object) -> object:
    """`torch.compile` of its own back ends: the function as it is, since what inductor generates is for a GPU. Raises
    UnsupportedOperation: a back end that is a function of the program, which would be given a graph;
    torch._dynamo.exc.InvalidBackend: a name that torch does not know."""
    if not isinstance(backend, str) and not getattr(backend, "__module__", "").startswith("torch."):
        raise UnsupportedOperation(
            f"torch.compile with backend {backend!r}: in the emulator functions run as they are, which torch's own "
            "back ends (inductor, eager, aot_eager, cudagraphs) may; a function would be called with a graph"
        )
    if isinstance(backend, str) and backend != "inductor":
        import torch._dynamo

        torch._dynamo.lookup_backend(backend)
    if model is None:
        return functools.partial(_uncompiled, backend=backend, **options)
    return model


def _leave_uncompiled(module: torch.nn.Module, *arguments: object, **options: object) -> None:
    """`torch.nn.Module.compile` likewise."""
    _uncompiled(module, *arguments, **options)


@contextlib.contextmanager
def capture(
    arch: str = DEFAULT_ARCH,
    options: Options | None = None,
    report: Callable[[EmulatedLaunch], None] | None = None,
    keep_ptx: str | os.PathLike[str] | None = None,
    *,
    overlap: bool = False,
    recorder: Recorder | None = None,
    roles: Mapping[str, Sequence[str]] | None = None,
    new_byte: int = 0,
) -> Iterator[Session]:
    """Runs in the emulator what this thread, and those that it starts, compile and launch inside.

    It needs neither GPU nor driver. Launches of several threads run one after the other.

    Args:
        arch: what kernels are compiled for and what device queries answer: a key of `cute_kernels.common.chips.CHIPS`.
        options: schedule, detectors and limits of every launch.
        report: called after each launch.
        keep_ptx: folder, made if it is missing, that gets ``launch-N-KERNEL.ptx`` and ``launch-N.json`` (grid, block,
            cluster, shared memory, parameters, outcome) of every launch N, failing ones included. Launches of one PTX
            share the file of the first. Such files of an earlier program are deleted.
        overlap: a launch with programmatic stream serialisation that comes directly behind another may begin before
            that one is over: what griddepcontrol.wait does not order is reported as a race. Launches run one after the
            other.
        recorder: takes every launch with the memory that it finds.
        roles: part of a kernel's name ("" fits all) -> name per warp of a CTA, "" for none; for counters, timelines
            and reports. The longest part that fits counts, and where none does, ``options.roles``.
        new_byte: what each byte of a tensor of ``torch.empty`` and its like is. With 255, NaN in every float type and
            -1 in integers, results show reads of memory that nobody has written.

    Yields:
        The `Session` with the launches so far.

    Raises:
        ValueError: an architecture that is none of `CHIPS`, an empty ``keep_ptx``, or a ``new_byte`` that is
            no int from 0 to 255.
        OSError: ``keep_ptx`` cannot be written into.
        EmulatorError: out of the call of the host function whose kernel failed; ``ptx`` and ``launch`` of the error are
            the kernel's text and the launch.
    """
    check_arch(arch)
    if type(new_byte) is not int or not 0 <= new_byte <= 255:
        raise ValueError(f"new_byte = {new_byte!r}: must be an int from 0 to 255")
    more = {"overlap": overlap, "recorder": recorder, "roles": roles, "new_byte": new_byte}
    session = Session(arch, options or Options(), report, keep_ptx, **more)
    with session.active():
        yield session


def _run_once(
    callable: Callable[..., object],
    *,
    kernel_arguments: object = None,
    workspace_generator: Callable[[], object] | None = None,
    **_: object,
) -> float:
    """Stands for cutlass.testing.benchmark: runs the function once; the time on a GPU is not known."""
    arguments = workspace_generator() if workspace_generator is not None else kernel_arguments
    callable(*arguments.args, **arguments.kwargs)
    return math.nan


def _run_untimed(callable: Callable[..., object], *arguments: object, **keywords: object) -> float:
    """Stands for what cutlass.testing.tune times by: all take equally long, so that the first is chosen."""
    for name in ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose", "current_stream"):
        keywords.pop(name, None)
    callable(*arguments, **keywords)
    return 0.0
