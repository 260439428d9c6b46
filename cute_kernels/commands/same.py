"""``cute-kernels same A B``: do two programs, or two configurations of a kernel, leave the same bits?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands.kernel_options import OPERATIONS, add_planned, plan_of_side
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH

_HELP = """Exit status: 0 the same bits, 1 they differ, 2 arguments that cannot be used or runs that cannot be compared
(also where launches write the same bits, but did not have the same inputs), 3 a kernel is at fault, 4 the emulator does
not implement something."""

_PROGRAMS = (".py", ".ptx", ".cu")


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "same",
        help="do two programs, or two configurations of a kernel, leave the same bits?",
        description="Runs A and B in the emulator and compares device memory bit by bit, launch by launch. A and B are "
        "command lines of programs ('bench.py --rows 64', a .ptx with its description), which have to make the same "
        "inputs, or two configurations of a kernel (FIELD=VALUE,.. or default), which get the same. Launches before a "
        "program fails are compared. Says the first launch, array and byte that differ.",
        epilog=_HELP,
    )
    add_planned(parser, names, "of configurations (%(default)s)")
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="'SCRIPT ARGS..', or FIELD=VALUE,.. or default")
    parser.add_argument(
        "--prefix",
        action="store_true",
        help="arrays of different sizes are compared as far as the smaller one goes: is a row the same in a larger "
        "batch?",
    )
    parser.add_argument("--json", type=files.from_here, metavar="FILE", help="write the answer as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the answer; returns the exit status.

    Raises:
        ValueError: sides that cannot be compared; OSError: a file that cannot be read or written.
    """
    extras.require("emulator", "the command same")
    import cute_kernels.emulator.checking.sameness as sameness

    if options.json is not None:
        files.check_output(options.json)
    sides = options.a, options.b
    programs = [Path((shlex.split(side) or [""])[0]).suffix in _PROGRAMS for side in sides]
    if programs[0] != programs[1]:
        raise ValueError(f"{options.a} and {options.b}: one is a program and one is a configuration")
    failed: list[str] = []
    memories = [_of_program(side, options, failed) for side in sides] if programs[0] else _of_plans(sides, options)
    if any(isinstance(each, int) for each in memories):
        return next(each for each in memories if isinstance(each, int) and each)
    both = min(map(len, memories)) if failed else None
    a, b = (each[:both] for each in memories)
    for side in failed:
        print(f"{side} failed, after its launches: {len(a)} of A and of B are compared")
    difference = sameness.first_difference(a, b, prefix=options.prefix)
    how = f"{len(a)} launches" if len(a) == len(b) else f"the last of {len(a)} launches and of {len(b)}"
    inputs = sameness.different_inputs(a, b) if difference is None else difference.inputs
    same = difference is None and not inputs
    if difference is not None:
        print(f"different: {difference}")
    else:
        print(f"same: {how}, bit by bit" if same else f"not comparable: {sameness.OTHER_INPUTS}: {inputs}")
    if options.json is not None:
        facts = dataclasses.asdict(difference) if difference is not None else None
        if facts is not None:
            facts |= {"a": difference.a.hex(), "b": difference.b.hex()}
        answer = {"a": options.a, "b": options.b, "same": same, "launches": [len(a), len(b)]}
        answer |= {"inputs": inputs, "failed": failed}
        files.write_text(options.json, json.dumps({**answer, "first_difference": facts}, indent=1) + "\n")
    return 0 if same else 1 if difference is not None else 2


def _of_program(side: str, options: argparse.Namespace, failures: list[str]) -> list | int:
    """Memory around the launches of a program, or the status of a kernel's fault; adds a program that failed itself."""
    import cute_kernels.emulator.checking.sameness as sameness
    import cute_kernels.emulator.machine.launch.schedule as schedule
    import cute_kernels.emulator.programs.capturing as capturing
    import cute_kernels.emulator.programs.program_run as program_run
    import cute_kernels.emulator.reports.reporter as reports

    script, *arguments = shlex.split(side)
    files.check_program(script)
    log, reporter = sameness.MemoryLog(), reports.Reporter()
    with capturing.capture(options.arch or DEFAULT_ARCH, recorder=log) as session:
        try:
            failed = lambda error, *notes: reporter.report(schedule.Schedule(), error, *notes)  # noqa: E731
            status = program_run.run_program(script, arguments, session, failed)
        except SystemExit as end:
            status = 0 if end.code in (None, 0) else 1
    if status not in (0, 1):
        return status
    if not log.launches:
        raise ValueError(f"{side} launched no kernel" + " before it failed" * status)
    failures += [side] * status
    return log.launches


def _of_plans(sides: Sequence[str], options: argparse.Namespace) -> list[list]:
    """Arrays that configurations write on random operands, which are the same for equal problems; no workspaces."""
    import torch

    import cute_kernels.emulator.checking.sameness as sameness
    import cute_kernels.operations.examples as examples
    import cute_kernels.operations.runtime.emulated as emulated

    plans = [plan_of_side(options, side) for side in sides]
    written: list[dict[str, torch.Tensor]] = []
    for plan in plans:
        operands = examples.random_operands(plan)
        emulated.launch(plan, operands)
        names = {name for part in plan.launches for name in operands.written(part)}
        written.append({name: tensor for name, tensor in operands.tensors().items() if name in names})
    both = tuple(name for name in written[0] if name in written[1])
    bits = [tuple(each[name].contiguous().view(torch.uint8).flatten().numpy() for name in both) for each in written]
    return [[sameness.LaunchMemory(plan.operation, (), after, both)] for plan, after in zip(plans, bits)]
