"""``cute-kernels profile``: where the warps of a kernel spend their clocks."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.commands.kernel_options import OPERATIONS, add_planned, count, plan_of
from cute_kernels.common import files
from cute_kernels.explore.comparison import MOST_EMULATED


def add_parser(commands: argparse._SubParsersAction, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    parser = commands.add_parser(
        "profile",
        help="time the phases of a kernel's warps, from the inside",
        description="Compiles a kernel whose warps write clock stamps, launches it on random operands, on the GPU at "
        "hand or in the emulator, and prints the clocks of a tile by role and phase. A launch with stamps is slower "
        "than one without; on a GPU both are timed. Statistics leave out the first and the last tile of each warp.",
    )
    add_planned(parser, names, device="the GPU, a B200 or an H200")
    parser.add_argument(
        "--device",
        choices=("auto", "gpu", "emulator"),
        default="auto",
        help=f"auto: a GPU that can run the kernel, otherwise the emulator if the problem has at most {MOST_EMULATED} "
        "tiles. Without --arch, the kernel is the one for the GPU. The emulator's clocks show the order of phases, not "
        "their time (default: %(default)s)",
    )
    parser.add_argument(
        "--stamps",
        type=count,
        default=16384,
        help="stamps that each warp may write, a multiple of 8; later ones are lost (default: %(default)s)",
    )
    parser.add_argument("--warps", action="store_true", help="on a GPU, also print statistics of every warp")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline for https://ui.perfetto.dev")
    parser.add_argument("--clusters", type=count, default=2, help="clusters in the timeline (default: %(default)s)")
    parser.add_argument(
        "--tiles", type=count, default=16, help="tiles of each warp in the timeline (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the statistics of every warp as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Profiles one launch and prints what its warps did. Raises ValueError: as
    `cute_kernels.explore.profiling.report.device_for`."""
    import cute_kernels.explore.profiling.report as report  # torch

    for path in (options.trace, options.json):
        if path is not None:
            files.check_output(path)
    at_hand = None if options.device == "emulator" else report.gpu_at_hand()
    if at_hand is not None:
        options.arch = options.arch or at_hand[0]
        options.sm_count = options.sm_count or at_hand[1]
    plan = plan_of(options, options.sm_count)
    found = report.profiled(plan, report.device_for(plan, options.device, at_hand, options.stamps), options.stamps)
    files.show("\n".join(found.lines(warps=options.warps)))
    if options.json is not None:
        found.write_json(options.json)
    if options.trace is not None:
        found.write_timeline(options.trace, options.clusters, options.tiles)
        files.show(f"\ntimeline: {options.trace.resolve()}; open it with https://ui.perfetto.dev")
    return 0
