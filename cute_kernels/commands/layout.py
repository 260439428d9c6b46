"""``cute-kernels layout``: where layouts of shared memory put their coordinates, and what accesses cost."""

import argparse
import dataclasses
import shlex

from cute_kernels.commands import tables
from cute_kernels.common import extras, files
from cute_kernels.common.chips import DEFAULT_ARCH


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "layout",
        help="show bytes, banks and lanes of a CuTe layout, or of a program's tensors, and count bank conflicts",
        description="Prints byte and bank of each coordinate of a layout in shared memory, and what one access of a "
        "warp costs. A program SCRIPT.py is run in the emulator: banks of the tensors that a kernel has in shared "
        "memory, and what its accesses cost, by tensor and line; of several launches, of the one with the "
        "most shared memory.",
        epilog="Exit status: 0; 2: arguments that cannot be used, or a program that fails.",
    )
    parser.add_argument(
        "layout",
        help="e.g. '(8,64):(64,1)'; 'S<3,4,3> o 0 o (8,64):(64,1)' swizzles elements, as a tensor does; or SCRIPT.py",
    )
    text = "swizzle addresses in bytes, as a pointer with a swizzle does"
    parser.add_argument("--swizzle", metavar="B,M,S", help=text)
    parser.add_argument("--dtype", help="type of the elements (default: bf16)")
    parser.add_argument(
        "--lanes", metavar="LAYOUT",
        help="layout from (lane, value) to a coordinate's index, rows fastest (default: (32,1):(1,0))",
    )  # fmt: skip
    parser.add_argument("--store", action="store_true", help="count a store in place of a load")
    parser.add_argument("--arch", help=f"of a program's kernels (default: {DEFAULT_ARCH})")
    parser.add_argument("--arguments", metavar="'ARGS'", help="arguments of a program, as one word")
    tables.add_formats(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the layout, or those of a program. Raises ValueError: texts that are no layouts, options of the other
    kind, a program that fails; OSError: no such program; MissingExtra: the emulator is not installed."""
    extras.require("emulator", "the command layout", ("numpy",))
    tables.check(options)
    program = options.layout.endswith(".py")
    others = ("swizzle", "dtype", "lanes", "store") if program else ("arch", "arguments")
    if given := [f"--{name}" for name in others if getattr(options, name)]:
        raise ValueError(f"{given[0]} is for {'a layout' if program else 'a program, SCRIPT.py'}")
    if program:
        return _of_program(options)
    import cute_kernels.explore.layout_view as layout_view

    told = {name: getattr(options, name) for name in ("swizzle", "dtype", "lanes") if getattr(options, name)}
    shown = layout_view.show_layout(options.layout, load=not options.store, **told)
    tables.show(options, shown.records(), shown.lines())
    return 0


def _of_program(options: argparse.Namespace) -> int:
    extras.require("emulator", "the command layout of a program")
    import cute_kernels.emulator as emulator
    import cute_kernels.explore.own_layouts as own_layouts
    import cute_kernels.explore.sweep_program as sweep_program

    files.check_program(options.layout)
    words, arch = shlex.split(options.arguments or ""), options.arch or DEFAULT_ARCH
    run = sweep_program.emulated(options.layout, words, arch, emulator.Options(counters=True))
    facts = sweep_program.facts_of(*run)
    if "reason" in facts:
        raise ValueError(f"{options.layout}: {facts['reason']}")
    memory = own_layouts.OwnMemory.read(facts["memory"])
    records = [dataclasses.asdict(each) | {"kinds": ", ".join(each.kinds)} for each in memory.accesses]
    tables.show(options, records, [*memory.lines()])
    return 0
