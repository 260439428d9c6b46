"""A table of what a CuTe DSL program does with different options: one run of it in the emulator for each."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import runpy
import site
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_kernels.common import extras, files
from cute_kernels.common.chips import CHIPS, DEFAULT_ARCH, check_arch
from cute_kernels.dsl import kernel_cache
from cute_kernels.explore.store import Store, package_digest, program_digest
from cute_kernels.explore.sweep_table import Row, evaluated
from cute_kernels.plan.base import SmemRegion, TmemRegion

_PACKAGE = Path(__file__).parents[1]

MOST_STATIC = 48 * 1024
"""Bytes of shared memory that a kernel may declare without asking for dynamic one, on all chips (CUDA programming
guide, compute capabilities)."""

if TYPE_CHECKING:
    from cute_kernels.emulator import Options
    from cute_kernels.emulator.captured_launch import CapturedLaunch
    from cute_kernels.emulator.errors import EmulatorError
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
    store: Store | None = None,
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
        store: where rows are kept and found; those of other shards are left out.

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
    tasks = ((Row(dict(chosen), arch=arch),) for chosen in settings)
    origin = {"program": state[0], "arguments": list(arguments), "digest": program_digest(Path(script))}
    given = {"executor": executor, "jobs": jobs, "seen": seen, "store": store}
    return evaluated(_evaluate, state, tasks, origin=origin, **given)


# --- one configuration, in a worker ----------------------------------------------------------------------------------


def _evaluate(state: tuple[str, str, tuple[str, ...]], row: Row) -> Row:
    script, arch, arguments = state
    words = [*arguments, *(f"--{name}={value}" for name, value in row.settings.items())]
    return row_of(row, cached(script, words, arch, lambda: _facts(script, words, arch)))


def row_of(row: Row, facts: Mapping[str, Any]) -> Row:
    """The row with facts of its run, as `facts_of` has them."""
    import cute_kernels.explore.own_layouts as own_layouts

    facts = dict(facts)
    regions, dynamic, columns, memory = (facts.pop(name, None) for name in ("arrays", "dynamic", "columns", "memory"))
    return replace(
        row,
        memory=own_layouts.OwnMemory.read(memory),
        smem=tuple(SmemRegion(name, first, nbytes, 1) for name, first, nbytes in regions or ()),
        smem_limit=CHIPS[row.arch].smem_bytes if dynamic else MOST_STATIC,
        tmem=(TmemRegion("allocated", 0, columns),) if columns else (),
        **facts,
    )


def _facts(script: str, words: Sequence[str], arch: str) -> dict[str, Any]:
    """Fields of a row, in types that JSON has."""
    import cute_kernels.emulator as emulator

    return facts_of(*emulated(script, words, arch, emulator.Options(counters=True)))


def facts_of(session: Session, reason: str | None) -> dict[str, Any]:
    """Fields of a row, in types that JSON has, of a session that has ended, and of why the program refused."""
    import cute_kernels.emulator.errors as errors
    import cute_kernels.explore.own_layouts as own_layouts
    import cute_kernels.explore.plan_facts as plan_facts

    status = min(map(errors.exit_status, session.failures), default=0)
    if session.failures:  # the kernel's fault, also where the program caught it
        reason = reason_of(session.failures[0])
    if reason is not None:
        return {"reason": reason, "status": status}
    reports = [launch.report for launch in session.launches]
    resources = [_resources(launch.launch) for launch in session.launches]
    largest = max(session.launches, key=lambda each: each.report.shared_bytes)
    return {
        "arrays": _arrays(largest.launch),
        "memory": asdict(own_layouts.of_launch(largest.launch, largest.report.units)),
        "dynamic": largest.launch.dynamic_smem,
        "columns": max(report.tensor_columns for report in reports),
        "registers": max(registers for registers, _ in resources),
        "stack_bytes": max(stack for _, stack in resources),
        "counts": dict(plan_facts.counts_of(reports)),
    }


def _arrays(launch: CapturedLaunch) -> list[tuple[str, int, int]]:
    """Name, first byte and bytes of the arrays in a CTA's shared memory, in their order; ``static`` or ``dynamic`` is
    what has no name."""
    import cute_kernels.emulator.isa.ptx.decode as decode
    import cute_kernels.emulator.machine.state.smem as memory
    import cute_kernels.emulator.reports.arrays as arrays

    found: list[arrays.Array] = []
    for each in arrays.arrays(launch.ptx, launch.kernel_name, launch):
        # Fields come before their structure, and arrays before tensors in them.
        if each.name and all(each.first + each.nbytes <= a.first or a.first + a.nbytes <= each.first for a in found):
            found.append(each)
    end = memory.shared_layout(decode.parse(launch.ptx).kernels[launch.kernel_name].variables)[1]
    begin = -(-end // _DYNAMIC_ALIGNMENT) * _DYNAMIC_ALIGNMENT
    regions, first = [], memory.SYSTEM_BYTES
    bounds = [("static", end), ("dynamic", begin + launch.dynamic_smem)] if launch.dynamic_smem else [("static", end)]
    for name, last in bounds:
        inside = sorted((each for each in found if first <= each.first < last), key=lambda each: each.first)
        for each in (*inside, arrays.Array("", last, 0)):
            regions += [(name, first, each.first - first), (each.name, each.first, each.nbytes)]
            first = each.first + each.nbytes
        first = begin
    return [(name, at - memory.SYSTEM_BYTES, nbytes) for name, at, nbytes in regions if nbytes > 0]


_DYNAMIC_ALIGNMENT = 1024
"""Alignment of dynamic shared memory behind static arrays in the emulator."""


def cached(script: str, words: Sequence[str], arch: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Facts that a run of a program gave, from disk where the same run was kept: the same words, package, versions, and
    text of the program and of all that it imported outside of the environment. A refusal is not kept: what the program
    misses may come, and nothing here would know."""
    root = kernel_cache.directory()
    key = json.dumps([script, list(words), arch, kernel_cache.fingerprint(), package_digest()])
    path = None if root is None else root / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.run"
    with contextlib.suppress(kernel_cache.InvalidEntry, ValueError, TypeError, KeyError):
        kept = json.loads(kernel_cache.read_private(path)) if path is not None else {}
        if all(_digest(file) == digest for file, digest in kept["files"].items()):
            return kept["facts"]
    made = run()
    if path is not None and "reason" not in made:
        files_of_run = {file: _digest(file) for file in (script, *_imported)}
        with contextlib.suppress(OSError):  # what cannot be kept is run again
            kernel_cache.make_private(root)
            kernel_cache.write_whole(path, json.dumps({"files": files_of_run, "facts": made}).encode())
    return made


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def emulated(script: str, arguments: Sequence[str], arch: str, options: Options) -> tuple[Session, str | None]:
    """A session in which a program has run to its end, quietly; and why it refused its arguments or launched nothing,
    or None. What a kernel is at fault in is in the session."""
    import cute_kernels.emulator.programs.capturing as capturing

    with capturing.capture(arch, options) as session:
        reason = run_once(script, arguments, io.StringIO())
        session.threads.wait()
    return session, without_launch(session, reason)


def without_launch(session: Session, reason: str | None) -> str | None:
    """The reason, or that nothing was launched."""
    if reason is None and not (session.launches or session.failures):
        return "the program launched no kernel"
    return reason


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
        if isinstance(end.code, str):
            return _plain(end.code)
        return f"exit status {end.code}" + (f": {_plain(said[-1])}" if said else "")
    except Exception as error:
        return reason_of(error)
    finally:
        note_imported()
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


_imported: list[str] = []
"""Files of the modules that the last program found outside of the environment and of this package."""


def note_imported() -> None:
    """Has `cached` keep what the modules that are imported now say."""
    _imported[:] = _own_modules()


def _own_modules() -> list[str]:
    inside = (sys.prefix, sys.base_prefix, str(_PACKAGE), *site.getsitepackages())
    found = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [os.path.abspath(file) for file in found if file and not os.path.abspath(file).startswith(inside)]


_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Codes that command a terminal (ECMA-48, CSI)."""

_LONG_NAME = re.compile(r"'[^' ]{60,}'")


def reason_of(error: BaseException) -> str:
    """Type and reason of an error, as one line without codes of a terminal: the assembler's own words where it refused
    the kernel, kind and line of a kernel's fault as ``emulate`` reports them, otherwise the first line."""
    import cute_kernels.emulator.errors as errors

    if isinstance(error, errors.EmulatorError):
        return _fault(error)
    log = getattr(error, "ptxas_error", "") or getattr(error, "nvvm_error", "")  # of CuTe DSL's compilation
    text = log or str(error).strip().partition("\n")[0]
    text = _LONG_NAME.sub(lambda name: f"{name[0][:40]}..'", _plain(text).removeprefix("ptxas error : "))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _fault(error: EmulatorError) -> str:
    """E.g. ``lanes-race at softmax.py:64: a load reads ..``."""
    import cute_kernels.emulator.reports.diagnosis as diagnosis

    found = diagnosis.diagnose(error)
    source, line = found.place.source, found.place.ptx_line
    place = f"{os.path.basename(source.path)}:{source.line}" if source else f"PTX line {line}"
    return _plain(f"{found.kind}{f' at {place}' if source or line else ''}: {found.sentence}")


def _plain(text: str) -> str:
    return files.printable(" ".join(_CODES.sub("", text).split()))


def _resources(launch: Any) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    import cute_kernels.operations.compile as compile

    found = compile.resource_usage(launch.machine_code, launch.kernel_name)
    return found.registers, found.stack_bytes
