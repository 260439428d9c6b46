"""The command line: ``cute-kernels demo``, ``plan``, ``ptx KERNEL``, ``emulate SCRIPT``, ``cache`` and ``doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import struct
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cute_kernels import __version__, files, siglip
from cute_kernels.config import Config, Problem
from cute_kernels.emulator import command
from cute_kernels.plan import CONFIG_TYPES, Plan, Sm100Plan, make_plan

# Legal integers that --help shows, by architecture; the plan judges what is given.
CHOICES = {
    "sm_100a": {"tile_n": (128, 256), "epilogue_warps": (4, 5), "tmem_load_width": (16, 32, 64)},
    "sm_90a": {"warpgroups": (1, 2, 3), "stage_blocks": (1, 2, 3, 4), "cluster": (1, 2)},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Exit status: 0 on success, 1 if a result is wrong or nobody reads the output, 2 if the arguments cannot be used
        or a file cannot be read or written, 130 after an interrupt.
    """
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        if sys.stdout is not None:  # closed by the caller's shell
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("cute-kernels: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"cute-kernels: error: {' '.join(str(error).split())}", file=sys.stderr)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            _discard_output()
        return 2


def _discard_output() -> None:
    """What is still in the buffer cannot be written, and the interpreter's own attempt when it exits must not fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except io.UnsupportedOperation:  # not a file
        return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cute-kernels", description="GPU kernels in CuTe DSL, and an emulator for them."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_plan(commands)
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


def _add_config(parser: argparse.ArgumentParser) -> None:
    """``--arch`` and ``--set``; the plan judges the values."""
    lines = []
    for arch, kind in CONFIG_TYPES.items():
        tunables = ", ".join(_describe(arch, field) for field in dataclasses.fields(kind))
        lines.append(f"{arch} ({kind.__name__}): {tunables}.")
    group = parser.add_argument_group("the kernel", " ".join(lines))
    group.add_argument(
        "--arch", choices=tuple(CONFIG_TYPES), default="sm_100a", help="target architecture (default: %(default)s)"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="settings",
        help="a tunable of the kernel, any number of times; the others keep the values above. Without any, the plan "
        "chooses for the problem",
    )


def _describe(arch: str, field: dataclasses.Field) -> str:
    kind = typing.get_type_hints(CONFIG_TYPES[arch])[field.name]
    choices = CHOICES[arch].get(field.name, (True, False) if kind is bool else typing.get_args(kind))
    default = f"{field.name}={_spelled(field.default)}"
    return f"{default} of {{{', '.join(map(_spelled, choices))}}}" if choices else default


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config(options: argparse.Namespace) -> Config | None:
    """The configuration of ``--arch`` and ``--set``; None, for the plan's choice, without ``--set``.

    Raises:
        ValueError: a setting that is no FIELD=VALUE, an unknown field, a value of another type, or a field set twice.
    """
    kind = CONFIG_TYPES[options.arch]
    kinds = {field.name: type(field.default) for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for setting in options.settings:
        name, separator, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not separator or name not in kinds:
            raise ValueError(f"--set {setting}: expected FIELD=VALUE; fields for {options.arch}: {', '.join(kinds)}")
        if name in values:
            raise ValueError(f"--set {setting}: {name} is set twice")
        values[name] = _parsed(setting, text.strip(), kinds[name])
    return kind(**values) if values else None


def _parsed(setting: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--set {setting}: expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"--set {setting}: expected an integer") from None


def _add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the problem")
    group.add_argument("--batch", type=_count, default=1, help="images (default: %(default)s)")
    group.add_argument("--positions", type=_count, default=196, help="patches per image (default: %(default)s)")
    group.add_argument("--features", type=_count, default=768, help="N (default: %(default)s)")
    group.add_argument("--in-features", type=_count, default=768, help="K, before zero-padding (default: %(default)s)")
    group.add_argument(
        "--table",
        choices=("positions", "bias", "none"),
        default="positions",
        help="what the epilogue adds: bias and position embedding, bias only, nothing (default: %(default)s)",
    )
    group.add_argument(
        "--scale",
        choices=("value", "pointer"),
        default="value",
        help="scale as a launch parameter or read from device memory (default: %(default)s)",
    )


def _plan_of(options: argparse.Namespace, sm_count: int | None = None) -> Plan:
    problem = Problem(
        m=options.batch * options.positions,
        n=options.features,
        k=-(-options.in_features // 16) * 16,
        table_rows={"positions": options.positions, "bias": 1, "none": 0}[options.table],
        scale_source=options.scale,
    )
    return make_plan(problem, _config(options), options.arch, sm_count=sm_count)


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
        help="auto: a GPU of compute capability 10.0 for sm_100a, otherwise the emulator (default: %(default)s)",
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
        arch=options.arch,
        config=_config(options),
        output=options.output,
        trace=options.trace,
    )
    console = Console()
    mismatches = run_demo(demo, console)
    if mismatches:
        console.print(f"[bold red]FAILED: {mismatches:,} elements differ from the torch reference[/]")
    return 1 if mismatches else 0


# --- plan ------------------------------------------------------------------------------------------------------------


def _add_plan(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plan",
        help="say how a problem would be run, or why it cannot be",
        description="Plans a launch and prints tiles, warp roles and the shared- and tensor-memory budget. Compiles "
        "nothing and needs no GPU.",
    )
    _add_problem(parser)
    parser.add_argument("--sm-count", type=_count, help="multiprocessors (default: those of a B200 or H200)")
    _add_config(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    plan = _plan_of(options, options.sm_count)
    config = ", ".join(f"{name}={_spelled(value)}" for name, value in dataclasses.asdict(plan.config).items())
    rows = [*plan.describe(), ("grid, cluster", f"{plan.grid}, {plan.cluster}"), ("config", config)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0


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
    _add_problem(parser)
    _add_config(parser)
    parser.set_defaults(run=_ptx)


def _ptx(options: argparse.Namespace) -> int:
    from cute_kernels.compile import compile_plan

    files.check_output(options.output)
    facts_path = options.output.with_name(options.output.name + ".json")
    files.check_output(facts_path)
    plan = _plan_of(options)
    artifact = compile_plan(plan)
    facts = {
        "kernel": artifact.kernel_name,
        "arch": plan.arch.name,
        "problem": dataclasses.asdict(plan.problem),
        "config": dataclasses.asdict(plan.config),
        "grid": plan.grid,
        "cluster": plan.cluster,
        "block": (plan.threads, 1, 1),
        "dynamic_smem_bytes": plan.smem_bytes,
        **_launch_parameters(plan),
        "tmem_columns": plan.tmem_columns if isinstance(plan, Sm100Plan) else 0,
        "table_shape": plan.table_shape,
        "warp_roles": plan.roles,
        "resources": dataclasses.asdict(artifact.resources),
    }
    files.write_text(options.output, artifact.ptx)
    files.write_text(facts_path, json.dumps(facts, indent=2) + "\n")
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
        description="Lists the compiled kernels on disk and verifies each, or deletes them all and what was tuned. "
        "CUTE_KERNELS_CACHE_DIR chooses the directory, an absolute path; off keeps kernels in memory only.",
    )
    parser.add_argument("--clear", action="store_true", help="delete every entry and lock, nothing else")
    parser.set_defaults(run=_cache)


def _cache(options: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from cute_kernels import cache, tuned

    root = cache.directory()
    if root is None:
        print("the cache is off (CUTE_KERNELS_CACHE_DIR=off)")
        return 0
    if options.clear:
        forgotten = tuned.clear()
        deleted = cache.clear(root)
        print(f"{deleted} kernels deleted from {root}; {forgotten} tuned configurations too; other files stay")
        return 0
    entries = cache.list_entries(root)
    if entries:
        table = Table("entry", "bytes", "kernel", "usable", box=box.SIMPLE)
        for entry in entries:
            table.add_row(entry.path.name[:12], f"{entry.nbytes:,}", entry.key, entry.problem or "yes")
        Console().print(table)
    nbytes = sum(entry.nbytes for entry in entries)
    print(f"{len(entries)} kernels, {nbytes:,} bytes, and {len(tuned.files())} tuned configurations in {root}")
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
