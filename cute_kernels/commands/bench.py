"""``cute-kernels bench``: a model's patch embedding before and after, in error and, on a GPU, in time."""

import argparse
from pathlib import Path

from cute_kernels.commands.kernel_options import count
from cute_kernels.common import extras, files


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a model with this package's patch embedding: error, and time on a GPU",
        description="Runs photographs through a model's vision tower, unchanged and with each precision of this "
        "package's patch embedding. Prints errors against the unchanged tower in FP32 and, on a GPU, times "
        "of the first layer and of the whole tower, and names the precision that fits.",
    )
    parser.add_argument("model", help="directory of a transformers checkpoint with its image processor, or a timm name")
    parser.add_argument("--batch", type=count, default=8, help="images (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: %(default)s")
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE", help="default: scikit-image's")
    parser.add_argument("--pretrained", action="store_true", help="let timm download the weights of a timm name")
    parser.add_argument("--rounds", type=count, default=9, help="timed runs of each (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table. Raises MissingExtra: what reads photographs, or has the default ones, is not installed;
    ModuleNotFoundError: the model's library is not; ValueError: a model without a patch embedding that
    this package replaces, or without a processor."""
    extras.require("demo", "the command bench", ("PIL", "numpy") + ("skimage",) * (not options.images))
    import cute_kernels.explore.model_bench as model_bench  # torch

    files.show(f"{options.model}, {options.batch} images")
    model = model_bench.load(options.model, options.images, options.batch, pretrained=options.pretrained)
    report = model_bench.measured(model, options.dtype, options.rounds)
    files.show("\n".join(report.lines()))
    return 0
