"""The command line: ``cute-kernels demo``, ``ptx KERNEL``, ``emulate SCRIPT``, ``cache`` and ``doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import struct
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_kernels import __version__, siglip
from cute_kernels.config import EpilogueArithmetic, Problem, TileConfig
from cute_kernels.emulator import command

if TYPE_CHECKING:
    from cute_kernels.plan import Plan

# Legal values that --help shows; the plan judges what is given.
CHOICES = {
    "tile_n": (128, 256),
    "epilogue_warps": (4, 5),
    "tmem_load_width": (16, 32, 64),
    "epilogue": typing.get_args(EpilogueArithmetic),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Exit status: 0 on success, 1 if a result is wrong, 2 if the arguments cannot be used.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError, ModuleNotFoundError) as error:
        print(f"cute-kernels: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cute-kernels", description="GPU kernels in CuTe DSL, and an emulator for them."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_ptx(commands)
    command.add_parser(commands)
    _add_cache(commands)
    _add_doctor(commands)
    return parser


def _count(text: str) -> int:
    """A positive integer, as argparse's ``type``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2**63 - 1")
    return int(text)


def _check_output(path: Path) -> None:
    """Before any work is done for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path} into")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file to write")


def _add_config(parser: argparse.ArgumentParser) -> None:
    """One option per field of `TileConfig`; the plan judges the values."""
    group = parser.add_argument_group("tunables of the kernel")
    for field in dataclasses.fields(TileConfig):
        kind = type(field.default)
        choices = CHOICES.get(field.name)
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=field.default,
            metavar=kind.__name__.upper() if choices is None else f"{{{','.join(map(str, choices))}}}",
            help="default: %(default)s",
        )


def _config(options: argparse.Namespace) -> TileConfig:
    return TileConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(TileConfig)})


# --- demo ------------------------------------------------------------------------------------------------------------


def _add_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="photographs to patch embeddings, compared with two references and drawn",
        description="Embeds the patches of photographs with the fused FP8 kernel, compares the result bit for bit with "
        "a torch reference and numerically with FP32, and draws it. Exits with 1 if a single bit differs.",
    )
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE", help="default: scikit-image's")
    parser.add_argument("--model", type=Path, metavar="DIR", help="local Hugging Face SigLIP or SigLIP2 checkpoint")
    parser.add_argument(
        "--architecture",
        default="base-p16",
        choices=siglip.ARCHITECTURES,
        help="shape of the seeded weights used without --model (default: %(default)s)",
    )
    parser.add_argument(
        "--image-size", type=_count, default=224, help="whole patches, for seeded weights (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of weights and schedule (default: %(default)s)")
    parser.add_argument(
        "--backend",
        choices=("auto", "emulator"),
        default="auto",
        help="auto: a GPU of compute capability 10.0 if there is one, otherwise the emulator",
    )
    parser.add_argument("--output", type=Path, default=Path("demo.png"), metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a timeline of the emulated launch for https://ui.perfetto.dev"
    )
    _add_config(parser)
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from cute_kernels.demo import DemoOptions, run_demo

    if options.model is not None and (options.architecture, options.image_size) != ("base-p16", 224):
        raise ValueError("--architecture and --image-size belong to seeded weights; --model brings its own")
    demo = DemoOptions(
        images=options.images,
        model=options.model,
        architecture=options.architecture,
        image_size=options.image_size,
        seed=options.seed,
        backend=options.backend,
        config=_config(options),
        output=options.output,
        trace=options.trace,
    )
    console = Console()
    mismatches = run_demo(demo, console)
    if mismatches:
        console.print(f"[bold red]FAILED: {mismatches:,} elements differ from the torch reference[/]")
    return 1 if mismatches else 0


# --- ptx -------------------------------------------------------------------------------------------------------------


def _add_ptx(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "ptx",
        help="write a kernel's PTX and how to launch it",
        description="Compiles a kernel (no GPU needed) and writes its PTX, and beside it a JSON file with the facts of "
        "a launch: entry, parameters, grid, cluster, block, shared memory, registers.",
    )
    parser.add_argument("kernel", choices=("patch-embed",))
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("patch_embed.ptx"), metavar="FILE",
        help="PTX file; facts go to FILE.json (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--batch", type=_count, default=1, help="images (default: %(default)s)")
    parser.add_argument("--positions", type=_count, default=196, help="patches per image (default: %(default)s)")
    parser.add_argument("--features", type=_count, default=768, help="N (default: %(default)s)")
    parser.add_argument("--in-features", type=_count, default=768, help="K, before zero-padding (default: %(default)s)")
    parser.add_argument(
        "--table",
        choices=("positions", "bias", "none"),
        default="positions",
        help="what the epilogue adds: bias and position embedding, bias only, nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--scale",
        choices=("value", "pointer"),
        default="value",
        help="scale as a launch parameter or read from device memory (default: %(default)s)",
    )
    _add_config(parser)
    parser.set_defaults(run=_ptx)


def _ptx(options: argparse.Namespace) -> int:
    from cute_kernels.compile import compile_plan
    from cute_kernels.plan import make_plan

    _check_output(options.output)
    problem = Problem(
        m=options.batch * options.positions,
        n=options.features,
        k=-(-options.in_features // 16) * 16,
        table_rows={"positions": options.positions, "bias": 1, "none": 0}[options.table],
        scale_source=options.scale,
    )
    plan = make_plan(problem, _config(options))
    artifact = compile_plan(plan)
    facts = {
        "kernel": artifact.kernel_name,
        "arch": plan.arch.name,
        "problem": dataclasses.asdict(problem),
        "config": dataclasses.asdict(plan.config),
        "grid": plan.grid,
        "cluster": plan.cluster,
        "block": (plan.threads, 1, 1),
        "dynamic_smem_bytes": plan.smem_bytes,
        **_launch_parameters(plan),
        "tmem_columns": plan.tmem_columns,
        "table_shape": plan.table_shape,
        "warp_roles": plan.roles,
        "resources": dataclasses.asdict(artifact.resources),
    }
    facts_path = options.output.with_name(options.output.name + ".json")
    options.output.write_text(artifact.ptx)
    facts_path.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{options.output}\n{facts_path}")
    return 0


def _launch_parameters(plan: Plan) -> dict[str, Any]:
    """What the generated host code passes to the kernel, read from a launch that is recorded instead of executed.

    Every tensor gets an address, and a scale by value a number, that occurs nowhere else, so that each is recognised in
    the parameters by its bytes.
    """
    from cute_kernels.compile import compile_plan, host_arguments
    from cute_kernels.emulator import host, tensor_map

    by_value = plan.problem.scale_source == "value"
    names = ["x", "weight", "out"] + ["table"] * (plan.problem.table_rows > 0) + ["scale"] * (not by_value)
    addresses = {name: 0x5EED_0000_0000 + (index + 1) * 0x1357_9000 for index, name in enumerate(names)}
    scale = struct.unpack("<f", b"\x35\x79\x1b\x3f")[0]
    patterns = {name: struct.pack("<Q", address) for name, address in addresses.items()}
    patterns |= {"scale": struct.pack("<f", scale)} if by_value else {}
    artifact = compile_plan(plan, emulated=True)
    arguments = {"table": None, "index": None, "scale": scale} | addresses
    launch = host.record(artifact.function, *host_arguments(plan, **arguments, stream=0))

    parameters = []
    for index, data in enumerate(launch.params):
        parameter: dict[str, Any] = {"index": index, "bytes": len(data)}
        if len(data) == 128:
            facts = dataclasses.asdict(tensor_map.decode(data))
            address = facts.pop("address")
            (tensor,) = (name for name, value in addresses.items() if value == address)
            parameter |= {"holds": "tensor map", "tensor": tensor, **facts}
        else:
            found = {name: data.find(pattern) for name, pattern in patterns.items()}
            contents = {name: offset for name, offset in found.items() if offset >= 0}
            parameter |= {"holds": "bytes", "offsets": contents, "hex": data.hex()}
        parameters.append(parameter)
    return {
        "parameters": parameters,
        "parameters_note": "Recorded from the generated host code for this problem; other problems have other values. "
        "Encode each tensor map with your tensor's address (dimension 0 is innermost, strides in bytes; u8 stands for "
        "float8_e4m3fn). In 'hex', replace what 'offsets' names, 8-byte addresses or the FP32 scale; they hold "
        "placeholders. What the other bytes mean is not decoded here, and padding among them may hold anything.",
        "placeholders": {name: pattern.hex() for name, pattern in patterns.items()},
    }


# --- cache -----------------------------------------------------------------------------------------------------------


def _add_cache(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "cache",
        help="list or clear the compiled kernels on disk",
        description="Lists the compiled kernels on disk and verifies each, or deletes them all. "
        "CUTE_KERNELS_CACHE_DIR chooses the directory, an absolute path; off keeps kernels in memory only.",
    )
    parser.add_argument("--clear", action="store_true", help="delete every entry and lock, nothing else")
    parser.set_defaults(run=_cache)


def _cache(options: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from cute_kernels import cache

    root = cache.directory()
    if root is None:
        print("the cache is off (CUTE_KERNELS_CACHE_DIR=off)")
        return 0
    if options.clear:
        print(f"{cache.clear(root)} kernels deleted from {root}; other files stay")
        return 0
    entries = cache.list_entries(root)
    if entries:
        table = Table("entry", "bytes", "kernel", "usable", box=box.SIMPLE)
        for entry in entries:
            table.add_row(entry.path.name[:12], f"{entry.nbytes:,}", entry.key, entry.problem or "yes")
        Console().print(table)
    print(f"{len(entries)} kernels, {sum(entry.nbytes for entry in entries):,} bytes in {root}")
    return 0


# --- doctor ----------------------------------------------------------------------------------------------------------


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="describe the environment and say what is wrong with it",
        description="Prints GPU, driver, CUDA and package versions and the cache, and how to mend what is wrong. Exits "
        "with 1 if something is.",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from cute_kernels import doctor

    findings = doctor.diagnose(doctor.inspect_environment())
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.status:5}  {finding.subject:{width}}  {finding.text}")
        if finding.remedy:
            print(f"{'':5}  {'':{width}}  -> {finding.remedy}")
    return 1 if any(finding.status == "wrong" for finding in findings) else 0
