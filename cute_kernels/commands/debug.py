"""``cute-kernels debug SCRIPT ARGS...``: one launch of a program, step by step."""

import argparse

from cute_kernels.commands import emulate as command
from cute_kernels.commands.kernel_options import count
from cute_kernels.common import files
from cute_kernels.emulator.checking import debug_shell
from cute_kernels.emulator.machine.launch import schedule
from cute_kernels.emulator.programs.recorded import RecordedLaunch

EXIT_STATUSES = command.exit_statuses(
    {
        0: "the session is over",
        2: "arguments that cannot be used, a program without launches, a command of --command that cannot be done",
    }
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = command.add_program_command(
        commands,
        "debug",
        debug,
        help="run a launch of a program step by step, with breakpoints",
        description="Runs a program once in the emulator, then one of its launches again from the memory that it "
        "found, under the same schedule, step by step: break, watch, continue, step, back; registers, shared, tile, "
        "tensor, memory, barriers, waiting, backtrace, origin. `help` at the prompt explains them.",
        statuses=EXIT_STATUSES,
        reports=False,
    )
    schedule.add_arguments(parser)
    parser.add_argument(
        "--launch",
        type=count,
        metavar="N",
        help="the program's N-th launch (default: the one that fails, else the first)",
    )
    parser.add_argument(
        "--command",
        action="append",
        default=[],
        metavar="TEXT",
        help="run this command instead of asking at a prompt; may be repeated",
    )


def debug(options: argparse.Namespace) -> int:
    """Runs the program and the session; returns the exit status. Raises OSError: no such program; ValueError: the
    program launches nothing, or a command of the options cannot be done."""
    chosen, how = schedule.of_arguments(options), command.run_options(options)
    facts = {"roles": dict(options.roles), "number": options.launch, "traceback": options.traceback}

    def recorded(script: str) -> RecordedLaunch:
        files.check_program(script)
        return debug_shell.recorded(script, options.arguments, options.arch, chosen, how, **facts)

    debug_shell.session(recorded(options.script), chosen, how, options.command, recorded)
    return 0
