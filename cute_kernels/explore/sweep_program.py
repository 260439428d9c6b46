"""A table of what a CuTe DSL program does with different options: one run of it in the emulator for each."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH, check_arch
from cute_kernels.explore.sweep_table import Row, evaluated
from cute_kernels.plan.base import SmemRegion, TmemRegion

if TYPE_CHECKING:
    from cute_kernels.emulator import Options
    from cute_kernels.emulator.programs.capturing import Session


def sweep_program(
    script: str | os.PathLike[str],
    settings: Iterable[Mapping[str, Any]],
    *,
    arch: str = DEFAULT_ARCH,
    arguments: Sequence[str] = (),
    executor: Executor | Callable[[], Executor] | None = None,
    jobs: int = 1,
    seen: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Runs a program once for each configuration, with its kernels in the emulator, detectors and counters on.

    A setting ``stages: 3`` reaches the program as its option ``--stages=3``, behind ``arguments``. What is compiled for
    a configuration and what its checks say is the program's own business: it refuses one by an exception or by an exit
    status other than 0, and a kernel that is at fault refuses it too.

    Args:
        script: a Python file, run as ``__main__``.
        settings: options and their values, one mapping for each configuration, as `sweep_table.grid` makes them.
        arch: what kernels are compiled for, as of `cute_kernels.emulator.programs.capture`.
        arguments: others of the program.
        executor, jobs: as for `cute_kernels.common.executors.Workers`.
        seen: called with each row as soon as it and all before it are known.

    Returns:
        A row for each configuration, in their order. ``counts`` are of all launches together; registers, stack, shared
        and tensor memory are the most that one of them has; no model knows the time of such a kernel.

    Raises:
        OSError: FileNotFoundError where there is no such file, IsADirectoryError where it is a folder.
        ValueError: ``jobs`` below 1, or an architecture that is not emulated.
        MissingExtra: the extra ``emulator`` is not installed.
    """
    extras.require("emulator", "a sweep of a program")

    check_arch(arch)
    files.check_program(script)
    state = (os.path.abspath(script), arch, tuple(arguments))
    return evaluated(_evaluate, state, map(dict, settings), executor=executor, jobs=jobs, seen=seen)


# --- one configuration, in a worker ----------------------------------------------------------------------------------


def _evaluate(state: tuple[str, str, tuple[str, ...]], chosen: Mapping[str, Any]) -> Row:
    import cute_kernels.emulator as emulator
    import cute_kernels.emulator.programs.program_run as program_run
    import cute_kernels.explore.plan_facts as plan_facts

    script, arch, arguments = state
    options = [f"--{name}={value}" for name, value in chosen.items()]
    session, reason = emulated(script, [*arguments, *options], arch, emulator.Options(counters=True))
    status = min(map(program_run.exit_status, session.failures), default=0)
    if session.failures:  # the kernel's fault, also where the program caught it
        reason = _first_line(session.failures[0])
    if reason is not None:
        return Row(chosen, reason=reason, status=status)
    reports = [launch.report for launch in session.launches]
    resources = [_resources(launch.launch) for launch in session.launches]
    shared, columns = (max(getattr(report, what) for report in reports) for what in ("shared_bytes", "tensor_columns"))
    return Row(
        chosen,
        smem=(SmemRegion("static and dynamic", 0, shared, 1),) if shared else (),
        tmem=(TmemRegion("allocated", 0, columns),) if columns else (),
        registers=max(registers for registers, _ in resources),
        stack_bytes=max(stack for _, stack in resources),
        counts=dict(plan_facts.counts_of(reports)),
    )


def emulated(script: str, arguments: Sequence[str], arch: str, options: Options) -> tuple[Session, str | None]:
    """A session in which a program has run to its end, quietly; and why it refused its arguments or launched nothing,
    or None. What a kernel is at fault in is in the session."""
    import cute_kernels.emulator.programs.capturing as capturing

    with capturing.capture(arch, options) as session:
        reason = run_once(script, arguments, io.StringIO())
        session.threads.wait()
    if reason is None and not (session.launches or session.failures):
        reason = "the program launched no kernel"
    return session, reason


def run_once(script: str, arguments: Sequence[str], output: io.StringIO) -> str | None:
    """Runs the program; why it refused its arguments, or None. What it prints goes nowhere."""
    import cute_kernels.emulator.programs.program_run as program_run

    known = set(sys.modules)
    printed = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
    try:
        with program_run.as_program(script, arguments), printed[0], printed[1]:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        said = output.getvalue().strip().splitlines()
        return end.code if isinstance(end.code, str) else f"exit status {end.code}" + (f": {said[-1]}" if said else "")
    except Exception as error:
        return _first_line(error)
    finally:
        # The next run has other options: it must not find what this one has compiled in a module of the program.
        for name in set(sys.modules) - known:
            if _is_beside(name, os.path.dirname(os.path.abspath(script))):
                del sys.modules[name]
    return None


def _is_beside(name: str, folder: str) -> bool:
    """Whether a module was found in this folder: not in an environment below it, and not one of this package."""
    module, top = sys.modules[name], name.partition(".")[0]
    beside = os.path.join(folder, top)
    # A package without an __init__.py has a path and no file.
    places = (getattr(module, "__file__", None) or "", *getattr(module, "__path__", ()))
    return top != "cute_kernels" and any(
        place in (beside, f"{beside}.py") or place.startswith(beside + os.sep) for place in places
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _resources(launch: Any) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    import cute_kernels.operations.compile as compile

    found = compile.resource_usage(launch.machine_code, launch.kernel_name)
    return found.registers, found.stack_bytes
