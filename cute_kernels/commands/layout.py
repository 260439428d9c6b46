"""``cute-kernels layout``: where a layout of shared memory puts its coordinates, and what an access costs."""

import argparse

from cute_kernels.commands import tables
from cute_kernels.common import extras


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "layout",
        help="show bytes, banks and lanes of a CuTe layout, and count bank conflicts",
        description="Prints byte and bank of each coordinate of a layout in shared memory, and what one access of a "
        "warp costs.",
        epilog="Exit status: 0; 2: arguments that cannot be used.",
    )
    parser.add_argument(
        "layout", help="e.g. '(8,64):(64,1)'; 'S<3,4,3> o 0 o (8,64):(64,1)' swizzles elements, as a tensor does"
    )
    parser.add_argument(
        "--swizzle", default="", metavar="B,M,S", help="swizzle addresses in bytes, as a pointer with a swizzle does"
    )
    parser.add_argument("--dtype", default="bf16", help="type of the elements (default: %(default)s)")
    parser.add_argument(
        "--lanes", default="(32,1):(1,0)", metavar="LAYOUT",
        help="layout from (lane, value) to a coordinate's index, rows fastest (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--store", action="store_true", help="count a store in place of a load")
    tables.add_formats(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the layout. Raises ValueError: texts that are no layouts; MissingExtra: NumPy is not installed."""
    extras.require("emulator", "the command layout", ("numpy",))
    import cute_kernels.explore.layout_view as layout_view

    tables.check(options)
    given = {"swizzle": options.swizzle, "dtype": options.dtype, "lanes": options.lanes, "load": not options.store}
    shown = layout_view.show_layout(options.layout, **given)
    tables.show(options, shown.records(), shown.lines())
    return 0
