"""``cute-kernels emulate SCRIPT ARGS...``: runs a CuTe DSL program with its kernels in the emulator."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path

from cute_kernels.emulator.capturing import ARCHITECTURES, EmulatedLaunch, capture
from cute_kernels.emulator.errors import EmulatorError
from cute_kernels.emulator.gpu import Options
from cute_kernels.files import check_output


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "emulate",
        help="run a CuTe DSL program without a GPU, its kernels in the emulator",
        description="Runs a Python program that launches CuTe DSL kernels: kernels execute in the emulator, host code, "
        "torch tensors on 'cuda' and the program's own checks run as they are, in host memory. Prints a line per "
        "launch, and what is wrong with a kernel (a race, a hang, ...) with its place in PTX and source. Exits as the "
        "program does, or with 1 if it raises. Options go before SCRIPT.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_100a", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default: %(default)s)")
    parser.add_argument(
        "--completion",
        choices=("eager", "lazy", "random"),
        default="eager",
        help="when asynchronous work takes effect: at once, as late as possible, at random (default: %(default)s)",
    )
    parser.add_argument(
        "--interleave",
        choices=("round_robin", "random", "starve"),
        default="round_robin",
        help="which warp runs next; starve: a role or warp only when nothing else can (default: %(default)s)",
    )
    parser.add_argument(
        "--spurious-timeouts", action="store_true", help="mbarrier.try_wait sometimes reports a timeout"
    )
    parser.add_argument("--no-detectors", action="store_true", help="do not look for hazards that change no result")
    parser.add_argument(
        "--strict", action="store_true", help="ask for synchronisation that the PTX ISA shows and NVIDIA's kernels omit"
    )
    defaults = Options()
    parser.add_argument(
        "--max-warp-instructions",
        type=int,
        metavar="N",
        default=defaults.max_warp_instructions,
        help="per cluster; a kernel that executes more has hung; 0: no limit (default: %(default)s)",
    )
    parser.add_argument(
        "--max-idle-blocks",
        type=int,
        metavar="N",
        default=defaults.max_idle_blocks,
        help="basic blocks per running warp without any effect (250 for a strong load) after which a kernel has hung; "
        "0: no limit (default: %(default)s)",
    )
    parser.add_argument("--counters", action="store_true", help="print what every unit did, per launch and warp role")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a timeline of the first launch for https://ui.perfetto.dev; FILE-2, FILE-3, ... hold the next ones",
    )
    parser.add_argument("--quiet", action="store_true", help="no line per launch")
    parser.add_argument(
        "--traceback", action="store_true", help="where in the program a launch failed, not only where in its kernel"
    )
    parser.add_argument("script", metavar="SCRIPT")
    own = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the program's own arguments")
    own.required = False  # else argparse asks for them where SCRIPT is missing
    parser.set_defaults(run=emulate)


def emulate(options: argparse.Namespace) -> int:
    """Runs the program; returns the exit status."""
    if not os.path.isfile(options.script):
        raise FileNotFoundError(f"no file {options.script}")
    if options.trace is not None:
        check_output(options.trace)
    how = Options(
        seed=options.seed,
        completion=options.completion,
        interleave=options.interleave,
        spurious_try_wait_failures=options.spurious_timeouts,
        detectors=not options.no_detectors,
        strict=options.strict,
        max_warp_instructions=options.max_warp_instructions or None,
        max_idle_blocks=options.max_idle_blocks or None,
        counters=options.counters,
        trace=options.trace,
    )
    failed = ""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    try:
        with capture(options.arch, how, None if options.quiet else _print) as session:
            try:
                runpy.run_path(options.script, run_name="__main__")
            except EmulatorError as error:
                failed = f"; {error.launch} failed" if error.launch else ""
                raise
            finally:
                for trace in session.traces:
                    if trace.exists():
                        print(f"timeline: {trace.resolve()}; open it with https://ui.perfetto.dev", flush=True)
                if not options.quiet:
                    count, total = len(session.launches), sum(launch.report.seconds for launch in session.launches)
                    complete = f"{count} launch{'' if count == 1 else 'es'}{' complete' if failed else ''}"
                    print(f"emulated: {complete} in {total:.1f} s{failed}", flush=True)
    except EmulatorError as error:
        if options.traceback:
            traceback.print_exc()
        print(f"cute-kernels: {error.describe()}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def _print(launch: EmulatedLaunch) -> None:
    print(f"emulated: {launch.summary()}", flush=True)
    if launch.report.units is not None:
        print(launch.report.units.describe(), flush=True)
