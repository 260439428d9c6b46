"""``cute-kernels emulate SCRIPT ARGS...``: runs a CuTe DSL program with its kernels in the emulator."""

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from cute_kernels.commands.kernel_options import HelpFormatter, count
from cute_kernels.common.chips import CHIPS, DEFAULT_ARCH
from cute_kernels.common.files import check_output, check_program, from_here, marked, show
from cute_kernels.emulator.errors import FAULT, REFUSED, EmulatorError, exit_status
from cute_kernels.emulator.machine.launch import schedule
from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.observe import roles
from cute_kernels.emulator.options import CHOICES, DETECTORS, Options
from cute_kernels.emulator.programs import ptx_files
from cute_kernels.emulator.programs.capturing import EmulatedLaunch, Session, capture
from cute_kernels.emulator.programs.program_run import run_program
from cute_kernels.emulator.reports import going_on, source_profile
from cute_kernels.emulator.reports.document import Outcome
from cute_kernels.emulator.reports.reporter import Reporter

_STATUSES = "Exit status: what the program passes to sys.exit, unchanged; else\n"


def exit_statuses(meanings: Mapping[int, str]) -> str:
    """The epilog of a command that runs a program: its exit statuses, beside what all such commands have."""
    shared = {
        1: "the program raised an exception of its own",
        REFUSED: "PTX, or something else of the program, that the emulator does not implement",
    }
    lines = (f"  {status}  {text}\n" for status, text in sorted((shared | dict(meanings)).items()))
    return _STATUSES + "".join(lines)


EXIT_STATUSES = exit_statuses({
    0: "the program ended, and every kernel was in order",
    2: "arguments that cannot be used, or a file that cannot be read or written",
    FAULT: "a kernel is at fault: a race, an illegal access, a hang, a trap, an illegal launch, ..., even if the "
    "program caught the error",
    REFUSED: "PTX, or something else of the program, that the emulator does not implement, even if the program caught "
    "the error",
})  # fmt: skip


def add_program_command(
    commands: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    statuses: str,
    reports: bool = True,
) -> argparse.ArgumentParser:
    """Adds a subcommand that runs a program, and returns its parser with all that such commands have in common; the
    parsers of ``commands`` are `CommandParser`s. How options and the program are told apart is added to the
    description; ``statuses``: of `exit_statuses`; ``reports``: whether it prints, writes and leaves out reports."""
    parser = commands.add_parser(
        name,
        runs_program=True,
        help=help,
        description=f"{description} Options go before SCRIPT; everything after it belongs to the program.",
        epilog=statuses,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--arch",
        choices=CHIPS,
        metavar="ARCH",
        help=f"the chip: {', '.join(CHIPS)} (default: that of a .ptx file, otherwise {DEFAULT_ARCH})",
    )
    parser.add_argument("--traceback", action="store_true", help="also print where in the program a launch failed")
    _add_run_arguments(parser)
    add_roles_argument(parser)
    if reports:
        _add_report_arguments(parser)
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        action=_Script,
        help="a Python program, or a .ptx or .cu file with one argument that describes its launches: FILE.json or "
        "FILE.py:FUNCTION",
    )
    own = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the program's own arguments")
    own.required = False  # else argparse asks for them where SCRIPT is missing
    parser.set_defaults(run=run)
    return parser


class _Script(argparse.Action):
    """Without ``--arch``, the program also says for which chip."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        namespace.script = values
        namespace.arch = namespace.arch or ptx_files.arch_of(str(values))


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = add_program_command(
        commands,
        "emulate",
        emulate,
        help="run a program without a GPU, its CuTe DSL kernels in the emulator",
        description="Runs a Python program that launches CuTe DSL kernels: kernels execute in the emulator, host code, "
        "torch tensors on 'cuda' and the program's own checks run as they are, in host memory. Prints a line per "
        "launch, and reports faults of kernels (a race, a hang, ...) with their place in PTX and source.",
        statuses=EXIT_STATUSES,
    )
    schedule.add_arguments(parser)
    add_going_on_arguments(parser)
    add_watch_argument(parser)
    parser.add_argument("--counters", action="store_true", help="print the counts of every unit, per launch and role")
    parser.add_argument(
        "--certificate",
        action="store_true",
        help="print for each launch whether its run stands for every schedule, and if not, why",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print counts by source line beside the source, per kernel: instructions, shared-memory wavefronts, bank "
        "conflicts, sectors and bytes of global memory",
    )
    parser.add_argument("--profile-json", type=from_here, metavar="FILE", help="write these counts as JSON")
    parser.add_argument(
        "--trace",
        type=from_here,
        metavar="FILE",
        help="write a timeline of the first launch for https://ui.perfetto.dev; FILE-2, FILE-3, ... hold the next ones",
    )
    parser.add_argument(
        "--keep-ptx",
        type=_folder,
        metavar="DIR",
        help="write facts of every launch, failing ones included (grid, block, cluster, shared memory, parameters), to "
        "DIR/launch-N.json, and each PTX text once, to DIR/launch-N-KERNEL.ptx; older files of these names are deleted",
    )
    parser.add_argument(
        "--fill-new",
        action="store_true",
        help="fill torch.empty and the like with NaN (-1 in integers) instead of zeros: results then show reads of "
        "memory that nobody has written",
    )
    parser.add_argument(
        "--processes",
        type=count,
        default=1,
        metavar="N",
        help="execute clusters of a launch in up to N processes, with the same results and reports (default: "
        "%(default)s)",
    )


def add_watch_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that runs the command again after every save."""
    parser.add_argument(
        "--watch",
        action="store_true",
        help="run again whenever the program or a module of it is saved; libraries stay loaded; Ctrl-C ends it",
    )


def add_roles_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names warps."""
    parser.add_argument(
        "--roles",
        type=_roles,
        action="append",
        default=[],
        metavar="[KERNEL:]ROLE=WARPS,..",
        help="name the warps of all kernels, or of those whose name contains KERNEL, in counters, timelines and "
        "reports, e.g. load=4,add=0-3 (default: after what they execute, e.g. TMA load)",
    )


def _roles(text: str) -> tuple[str, tuple[str, ...]]:
    try:
        return roles.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what of a kernel is reported, whatever the schedule."""
    parser.add_argument("--no-detectors", action="store_true", help="switch all detectors off")
    parser.add_argument(
        "--without",
        action="append",
        choices=DETECTORS,
        default=[],
        metavar="DETECTOR",
        help=f"switch one detector off; may be repeated: {', '.join(DETECTORS)}",
    )
    parser.add_argument(
        "--strict", action="store_true", help="also require synchronisation of the PTX ISA that NVIDIA's kernels omit"
    )
    defaults = Options()
    parser.add_argument(
        "--arithmetic",
        choices=CHOICES,
        default=defaults.arithmetic,
        help="how tensor cores add: silicon: as measured on the chip that the PTX is for; exact: exactly, with one "
        "rounding per instruction (default: %(default)s)",
    )
    parser.add_argument(
        "--max-warp-instructions",
        type=int,
        metavar="N",
        default=defaults.max_warp_instructions,
        help="report a hang after N warp instructions of a cluster; 0: no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--max-idle-blocks",
        type=int,
        metavar="N",
        default=defaults.max_idle_blocks,
        help="report a hang after N basic blocks of each running warp without an effect; a strong load counts as 250 "
        "blocks; 0: no limit (default: %(default)s)",
    )


def _folder(text: str) -> Path:
    """The name of a folder, as argparse's ``type``; pathlib takes an empty one for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: must be that of a folder")
    return Path(text)


def report_fault(error: EmulatorError) -> int:
    """Prints a report of an error that came out of another command; returns the exit status."""
    Reporter().report(Schedule(), error)
    return exit_status(error)


def emulate(options: argparse.Namespace) -> int:
    """Runs the program; returns the exit status, see `EXIT_STATUSES`. Raises SystemExit: the program's own; OSError: no
    such program, or a file or folder of an option that cannot be written."""
    check_program(options.script)
    if options.trace is not None:
        check_output(options.trace)
    if options.profile_json is not None:
        check_output(options.profile_json)
    profiled = options.profile or options.profile_json is not None
    chosen = schedule.of_arguments(options)
    reporter = make_reporter(options)
    failed = functools.partial(reporter.report, chosen)
    going = make_going_on(options, failed)
    facts = run_options(options) | {"going_on": going}
    how = chosen.options(
        counters=options.counters or profiled, trace=options.trace, processes=options.processes, **facts
    )

    def report(launch: EmulatedLaunch) -> None:
        show("\n".join(launch.lines(counters=options.counters, certificate=options.certificate)))

    more = {"overlap": chosen.overlap, "roles": dict(options.roles), "new_byte": 255 if options.fill_new else 0}
    session = capture(options.arch, how, None if options.quiet else report, options.keep_ptx, **more)
    with session as session, reporter.writing(outcome_of(options, "emulate")) as outcome:
        outcome.arguments = replay_words(options, chosen)
        outcome.seed, outcome.schedule = chosen.seed, chosen.arguments()
        try:
            outcome.status = run_program(options.script, options.arguments, session, failed, options.traceback)
            if reporter.faults and outcome.status in (0, 1):  # what the program makes of it comes second
                outcome.status = FAULT
        finally:
            outcome.launches = session.facts()
            if going is not None:
                going.note_suppressed(outcome)
            for trace in filter(Path.is_file, session.traces):
                show(f"timeline: {trace.resolve()}; open it with https://ui.perfetto.dev")
            if not options.quiet:
                show(session.total())
            if profiled:
                _write_profile(options, session, reporter)
    return outcome.status


def run_options(parsed: argparse.Namespace) -> dict[str, object]:
    """Fields of `Options` that the options of `_add_run_arguments` choose."""
    return {
        "detectors": not parsed.no_detectors,
        "without": tuple(parsed.without),
        "strict": parsed.strict,
        "arithmetic": parsed.arithmetic,
        "max_warp_instructions": parsed.max_warp_instructions or None,
        "max_idle_blocks": parsed.max_idle_blocks or None,
    }


def run_words(parsed: argparse.Namespace) -> list[str]:
    """Words of a command line for the parser of `_add_run_arguments`, without what is the default."""
    words = ["--no-detectors"] if parsed.no_detectors else []
    words += [word for name in parsed.without for word in ("--without", name)]
    words += ["--strict"] if parsed.strict else []
    words += ["--keep-going"] if getattr(parsed, "keep_going", False) else []
    words += ["--fill-new"] if getattr(parsed, "fill_new", False) else []
    words += [word for each in parsed.roles for word in ("--roles", roles.text_of(*each))]
    words += [word for each in parsed.suppress for word in ("--suppress", str(each))]
    words += [word for path in parsed.suppressions for word in ("--suppressions", str(path))]
    defaults = Options()
    for name in ("arithmetic", "max_warp_instructions", "max_idle_blocks"):
        if (value := getattr(parsed, name)) != getattr(defaults, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def add_going_on_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option that says that execution goes on after reports."""
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="go on after reports of detectors (races, missing fences, reads of what nobody wrote, ...), and print "
        "each once; the exit status stays 3",
    )


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where reports go, and which ones are left out."""
    parser.add_argument("--quiet", action="store_true", help="print reports and nothing else")
    parser.add_argument(
        "--verbose", action="store_true", help="print reports with PTX, all barriers and the full message"
    )
    parser.add_argument(
        "--report", type=from_here, metavar="FILE", help="write reports and launches as JSON, even if nothing is wrong"
    )
    parser.add_argument(
        "--sarif", type=from_here, metavar="FILE", help="write reports as SARIF 2.1.0, for code hosts and editors"
    )
    parser.add_argument(
        "--suppress",
        type=_suppression,
        action="append",
        default=[],
        metavar="KIND[:FILE[:LINE]]",
        help="leave out reports of this kind, or only those with one side in FILE, at LINE; may be repeated",
    )
    parser.add_argument(
        "--suppressions",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file of suppressions, one a line; # begins a comment",
    )


def _suppression(text: str) -> going_on.Suppression:
    try:
        return going_on.Suppression.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_going_on(parsed: argparse.Namespace, report: Callable[[EmulatorError], object]) -> going_on.GoingOn | None:
    """Going on as the options of `add_going_on_arguments` and `_add_report_arguments` say; None: reports raise.
    Raises OSError, ValueError: a file of suppressions."""
    suppressions = going_on.all_of(parsed.suppress, parsed.suppressions)
    keep_going = getattr(parsed, "keep_going", False)
    if not (keep_going or suppressions):
        return None
    return going_on.GoingOn(keep_going, suppressions, report)


def make_reporter(parsed: argparse.Namespace) -> Reporter:
    """Reporter as the options of `_add_report_arguments` say."""
    made = Reporter(lambda schedule: replay_words(parsed, schedule), parsed.verbose, parsed.report, parsed.sarif)
    made.check_files()
    return made


def outcome_of(parsed: argparse.Namespace, name: str) -> Outcome:
    """The outcome of the command ``name`` as far as it is known in the beginning."""
    return Outcome(name, replay_words(parsed, Schedule(), name), parsed.script, parsed.arch)


def replay_words(parsed: argparse.Namespace, schedule: Schedule, name: str = "emulate") -> list[str]:
    """The command ``name`` for the same program, under a schedule."""
    words = ["cute-kernels", name, "--arch", parsed.arch, *schedule.arguments(), *run_words(parsed)]
    # Without it the name of a script that begins with a dash would be taken for an option.
    words += ["--"] if parsed.script.startswith("-") else []
    return [*words, parsed.script, *parsed.arguments]


def _write_profile(options: argparse.Namespace, session: Session, reporter: Reporter) -> None:
    found = source_profile.profiles(
        (each.launch.ptx, each.launch.kernel_name, each.report.units) for each in session.launches if each.report.units
    )
    if options.profile:
        for each in found:
            show(f"\n{each.text(marked)}")
    if options.profile_json is not None:
        document = {"columns": source_profile.COLUMNS, "kernels": [each.document() for each in found]}
        reporter.others.append((options.profile_json, lambda: json.dumps(document, indent=1) + "\n"))
