"""Options by which commands name a kernel, a problem and tunables: ``--batch``, ``--arch``, ``--set`` and the like."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from cute_kernels.config import ACTIVATIONS, GemmProblem, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.config_codec import OPEN, parse_settings, spell
from cute_kernels.config_types import field_type
from cute_kernels.plan import ARCHS, PLANNERS, Kernel, Plan, Planner, make_plan
from cute_kernels.plan.gemm import B_TYPES
from cute_kernels.plan.images import PIXEL_TYPES

OPERATIONS: dict[str, Planner] = {name.replace("_", "-"): planner for name, planner in PLANNERS.items()}
"""By the name that commands give it."""

DEFAULT_ARCH = "sm_100a"
"""Architecture of a command without ``--arch``, if there is a kernel for it; otherwise the operation's first."""


MOST_EMULATED = 64
"""Tiles of a problem that a command executes in the emulator without being asked to."""


def tiles_of(plan: Plan) -> int:
    """Tiles of the kernel of a plan that has the most."""
    return max(getattr(part, "tiles", 1) for part in plan.launches)


def count(text: str) -> int:
    """A positive integer, as argparse's ``type``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


# --- tunables --------------------------------------------------------------------------------------------------------


def add_kernel(parser: argparse.ArgumentParser, *names: str) -> None:
    """``--arch`` and ``--set`` for the kernels of these operations; the plan judges the values."""
    lines, shown = [], {}
    for name in names:
        archs: dict[tuple[Kernel, ...], list[str]] = {}
        for arch, kernels in OPERATIONS[name].kernels.items():
            archs.setdefault(kernels, []).append(arch)
        for kernels, arch in ((kernels, ", ".join(those)) for kernels, those in archs.items()):
            for kernel in kernels:
                kind = kernel.config.__name__
                tunables = ", ".join(_describe(kernel, field) for field in dataclasses.fields(kernel.config))
                lines.append(f"{name}, {arch} ({kind}): {f'as of {shown[kind]}' if kind in shown else tunables}.")
                shown.setdefault(kind, name)
    group = parser.add_argument_group("the kernel", " ".join(lines))
    archs = dict.fromkeys(arch for name in names for arch in OPERATIONS[name].kernels)
    defaults = {name: _default_arch(name) for name in names}
    common = defaults[names[0]]
    others = "".join(f", of {name} {arch}" for name, arch in defaults.items() if arch != common)
    group.add_argument("--arch", choices=tuple(archs), help=f"target architecture (default: {common}{others})")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="settings",
        help="a tunable of the kernel, any number of times; the others keep the values above, of which auto is chosen "
        "for the problem. Of several kernels, the one that the problem gets, or the first that has all of them",
    )


def _describe(kernel: Kernel, part: dataclasses.Field) -> str:
    """``FIELD=DEFAULT``, what an open one is, and the values that there are."""
    known = kernel.fields.get(part.name)
    choices = (True, False) if field_type(part)[0] is bool else () if known is None else known.legal
    meaning = f" ({known.open})" if part.default is None and known is not None else ""
    default = f"{part.name}={spell(part.default)}{meaning}"
    return f"{default} of {{{', '.join(map(spell, choices))}}}" if choices else default


def _default_arch(name: str) -> str:
    kernels = OPERATIONS[name].kernels
    return DEFAULT_ARCH if DEFAULT_ARCH in kernels else next(iter(kernels))


def arch_of(options: argparse.Namespace, name: str) -> str:
    """The architecture of ``--arch``, or the operation's default.

    Raises:
        ValueError: there is no kernel for it.
    """
    arch = options.arch or _default_arch(name)
    if arch not in OPERATIONS[name].kernels:
        raise ValueError(f"--arch {arch}: allowed for {name}: {', '.join(OPERATIONS[name].kernels)}")
    return arch


def config_of(options: argparse.Namespace, name: str, problem: Any) -> Any:
    """The configuration of ``--arch`` and ``--set``; None, for the plan's choice, without ``--set``.

    It is one of the kernel that the problem gets, if that has all settings, or of the first kernel that has.

    Args:
        options: with `add_kernel`.
        name: of the operation.
        problem: what it is to compute.

    Raises:
        ValueError: a setting that is no FIELD=VALUE, an unknown field, a value of another type, or a field set twice;
            a problem that no kernel takes.
    """
    if not options.settings:
        return None
    planner, arch = OPERATIONS[name], ARCHS[arch_of(options, name)]
    planner.check(problem)
    usual = planner.kernel(problem, arch)
    named = [kernel for kernel in planner.of(arch.name) if _has_all(kernel, options.settings)]
    taking = [kernel for kernel in named if not kernel.takes(problem, arch)]
    kernel = usual if usual in named else next(iter((*taking, *named)), usual)
    return parse_settings(kernel.config, options.settings, f"{arch.name}, {kernel.config.__name__}")


def _has_all(kernel: Kernel, settings: Sequence[str]) -> bool:
    """Whether a kernel has the fields of all settings and, where they are words, the words."""
    kinds = {part.name: field_type(part) for part in dataclasses.fields(kernel.config)}
    for setting in settings:
        name, _, value = (part.strip() for part in setting.partition("="))
        name = name.replace("-", "_")
        kind, is_open = kinds.get(name, (None, False))
        if kind is None or (kind is str and value not in kernel.fields[name].legal and not (is_open and value == OPEN)):
            return False
    return True


# --- problems --------------------------------------------------------------------------------------------------------


class _Problems:
    """Groups of options on a parser, each of one or several kernels."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._owners: dict[str, tuple[str, ...]] = {}
        parser.set_defaults(owners=self._owners, parser=parser)

    def group(self, *kernels: str) -> typing.Callable[..., None]:
        """``add_argument`` of a group for these kernels."""
        group = self._parser.add_argument_group(f"the problem of {' and '.join(kernels)}")

        def add(name: str, **settings: Any) -> None:
            self._owners[group.add_argument(name, **settings).dest] = kernels

        return add


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The options of every kernel's problem, which `plan_of` reads."""
    problems = _Problems(parser)
    dtypes = ("bfloat16", "float16", "float32")

    add = problems.group("patch-embed", "patch-embed-images")
    add("--batch", type=count, default=1, help="images (default: %(default)s)")
    add("--features", type=count, default=768, help="N (default: %(default)s)")
    add(
        "--table",
        choices=("positions", "bias", "none"),
        default="positions",
        help="what the epilogue adds: bias and position embedding, bias only (of uint8 images, the normalisation's "
        "offset counts as bias), nothing (default: %(default)s)",
    )

    add = problems.group("patch-embed")
    add("--positions", type=count, default=196, help="patches per image (default: %(default)s)")
    add("--in-features", type=count, default=768, help="K, before zero-padding (default: %(default)s)")
    add(
        "--scale",
        choices=("value", "pointer"),
        default="value",
        help="scale as a launch parameter or read from device memory (default: %(default)s)",
    )
    add("--feature-scale", action="store_true", help="a factor of the scale for every feature")

    add = problems.group("patch-embed", "gemm")
    add("--row-scale", action="store_true", help="a factor of the scale for every row of x, or of a")

    add = problems.group("patch-embed-images")
    for name in ("height", "width"):
        add(f"--{name}", type=count, default=224, help="of an image in pixels, whole patches (default: %(default)s)")
    add("--channels", type=count, default=3, help="default: %(default)s")
    add("--patch", type=count, default=16, help="pixels of a patch along each side (default: %(default)s)")
    add("--channels-last", action="store_true", help="the channels of a pixel are neighbours in memory")
    add(
        "--precision",
        choices=tuple(PIXEL_TYPES),
        default="int8",
        help="of the prepared weight (default: %(default)s)",
    )

    add = problems.group("gemm")
    for name, meaning in (("m", "rows of a"), ("n", "rows of b"), ("k", "elements of a row")):
        add(f"--{name}", type=count, default=4096, help=f"{meaning} (default: %(default)s)")
    add("--batches", type=count, default=1, help="products (default: %(default)s)")
    add("--bias", action="store_true", help="add a bias")
    add("--activation", choices=ACTIVATIONS, default="none", help="of the sum; default: %(default)s")
    add("--column-scale", action="store_true", help="a factor of the scale for every column of the output")
    add("--residual", choices=dtypes, help="element type of what is added after the activation (default: nothing)")

    add = problems.group("gemm", "patch-embed-images")
    add(
        "--in-dtype",
        choices=tuple(B_TYPES),
        help="element type of a gemm's a (default: bfloat16; float32 is multiplied as TF32), or of the images "
        "(default: uint8 with int8, otherwise that of --precision)",
    )
    add("--out-dtype", choices=(*dtypes, "float8_e4m3fn"), default="bfloat16", help="default: %(default)s")


def plan_of(options: argparse.Namespace, sm_count: int | None = None) -> Plan:
    """The plan of a command with `add_problem` and `add_kernel` for its ``kernel``.

    Raises:
        ValueError: an option of another kernel, a setting that cannot be read, or what the plan refuses.
    """
    problem = problem_of(options)
    config = config_of(options, options.kernel, problem)
    return make_plan(problem, config, arch_of(options, options.kernel), sm_count=sm_count)


def problem_of(options: argparse.Namespace) -> Any:
    """The problem of a command with `add_problem` for its ``kernel``.

    Raises:
        ValueError: an option of another kernel.
    """
    for name, owners in options.owners.items():
        if options.kernel not in owners and getattr(options, name) != options.parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} is no option of {options.kernel}")
    return _PROBLEMS[options.kernel](options)


def _gemm(options: argparse.Namespace) -> GemmProblem:
    return GemmProblem(
        m=options.m,
        n=options.n,
        k=options.k,
        batches=options.batches,
        in_dtype=options.in_dtype or "bfloat16",
        out_dtype=options.out_dtype,
        bias=options.bias,
        activation=options.activation,
        row_scale=options.row_scale,
        column_scale=options.column_scale,
        residual=options.residual,
    )


def _patch_embed(options: argparse.Namespace) -> PatchEmbedProblem:
    return PatchEmbedProblem(
        m=options.batch * options.positions,
        n=options.features,
        k=-(-options.in_features // 16) * 16,
        table_rows={"positions": options.positions, "bias": 1, "none": 0}[options.table],
        scale_source=options.scale,
        row_scale=options.row_scale,
        feature_scale=options.feature_scale,
    )


def _patch_embed_images(options: argparse.Namespace) -> PatchEmbedImagesProblem:
    problem = PatchEmbedImagesProblem(
        batch=options.batch,
        channels=options.channels,
        height=options.height,
        width=options.width,
        patch=options.patch,
        n=options.features,
        in_dtype=options.in_dtype or PIXEL_TYPES[options.precision],
        channels_last=options.channels_last,
        precision=options.precision,
        out_dtype=options.out_dtype,
    )
    rows = {"positions": problem.positions, "bias": 1, "none": 0}[options.table]
    return dataclasses.replace(problem, table_rows=rows)


_PROBLEMS = {"patch-embed": _patch_embed, "patch-embed-images": _patch_embed_images, "gemm": _gemm}
