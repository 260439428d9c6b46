"""``cute-kernels sass``: what the assembler made of a kernel that costs, beside its source."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cute_kernels.commands.kernel_options import OPERATIONS, add_plan, plan_of
from cute_kernels.commands.sweep import add_subject
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.explore import sweep_program
from cute_kernels.operations import compile

if TYPE_CHECKING:
    from cute_kernels.explore.sass.report import MachineCode


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "sass",
        help="show what costs in a kernel's machine code, by source line and loop",
        description="Compiles a kernel, or runs a program SCRIPT.py in the emulator and takes every kernel that it "
        "launches. Reads the machine code: instructions and clocks of issue by source line, loops, and what costs in "
        "loops: MEMBAR, CCTL.IVALL, waits for loads, moves beside MMAs; and spills. Needs no GPU.",
        epilog="Exit status: 0: whatever is found; 1: a program failed; 2: arguments that cannot be used; of a "
        "program, 3: a kernel is at fault, 4: it needs what the emulator does not implement.",
    )
    add_subject(parser)
    parser.add_argument("--ptx", action="store_true", help="print the PTX of loops with the instructions made of it")
    parser.add_argument("--json", type=files.from_here, metavar="FILE", help="write everything as JSON")
    add_plan(parser, names)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints what costs in every kernel of the subject; returns the exit status."""
    extras.require("emulator", "the command sass")
    if options.json is not None:
        files.check_output(options.json)
    found, status = (_of_program if options.kernel.endswith(".py") else _of_kernel)(options)
    for number, each in enumerate(found):
        annotated = f"\n\n{each.annotated()}" if options.ptx else ""
        files.show(("\n" if number else "") + each.text(files.marked) + annotated)
    if options.json is not None:
        import cute_kernels.explore.sass.findings as findings
        import cute_kernels.explore.sass.report as report

        document = {"columns": report.COLUMNS, "kinds": findings.KINDS, "kernels": [each.document() for each in found]}
        files.write_text(options.json, json.dumps(document, indent=1) + "\n")
    return status


def _of_kernel(options: argparse.Namespace) -> "tuple[list[MachineCode], int]":
    if options.arguments:
        raise ValueError("--arguments are for a program, SCRIPT.py")
    artifacts = [compile.compile_plan(part, emulated=True) for part in plan_of(options).launches]
    return [each for artifact in artifacts for each in _read(artifact.cubin, artifact.ptx)], 0


def _of_program(options: argparse.Namespace) -> "tuple[list[MachineCode], int]":
    """Every kernel that the program launches, also where the emulator reports it; and the exit status."""
    if options.settings:
        raise ValueError("--set is for this package's kernels; a program gets --arguments")
    import cute_kernels.emulator as emulator
    import cute_kernels.emulator.errors as errors

    files.check_program(options.kernel)
    arguments, how = shlex.split(options.arguments), emulator.Options(detectors=False)
    session, reason = sweep_program.emulated(options.kernel, arguments, options.arch or DEFAULT_ARCH, how)
    launches = [each.launch for each in (*session.launches, *session.failures) if each.launch is not None]
    for error in session.failures:
        reason = f"{error.launch_name()} failed in the emulator: {str(error).splitlines()[0]}"
    if reason is not None:
        print(f"cute-kernels: {reason}", file=sys.stderr)
    status = min(map(errors.exit_status, session.failures), default=int(reason is not None))
    modules = {launch.ptx: launch.machine_code for launch in launches if launch.machine_code}
    return [each for ptx, code in modules.items() for each in _read(code, ptx)], status


def _read(code: bytes, ptx: str) -> "list[MachineCode]":
    import cute_kernels.explore.sass.report as report

    return report.machine_code(compile.disassemble(code, "-hex", "-gp"), ptx)
