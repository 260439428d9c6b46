"""Options by which commands name a kernel, a problem and tunables: ``--batch``, ``--arch``, ``--set`` and the like."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from cute_kernels.config import (
    ACTIVATIONS,
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.config_codec import parse_settings, spell
from cute_kernels.plan import PLANNERS, Plan, make_plan
from cute_kernels.plan.images import PIXEL_TYPES
from cute_kernels.plan.registry import Target

_SM80 = {
    "tile_m": (32, 64, 128, 192, 256), "tile_n": (64, 128, 192, 256), "warps_m": (1, 2, 4), "warps_n": (1, 2, 4),
    "row_bytes": (64, 128),
}  # fmt: skip

# Legal integers that --help shows, by class of tunables; the plan judges what is given.
CHOICES: dict[type, dict[str, tuple[int, ...]]] = {
    Sm100PatchEmbedConfig: {
        "tile_n": (128, 256), "epilogue_warps": (4, 5), "tmem_load_width": (16, 32, 64), "cta_group": (1, 2),
        "tile_positions": (0, 1, 2, 4, 8), "tmem_loads": (1, 2), "store_group": (1, 2, 3, 4),
        "store_buffers": (1, 2, 4),
    },
    Sm100ResidentConfig: {
        "cta_group": (0, 1, 2), "accumulators": (0, 1, 2), "tmem_load_width": (0, 16, 32, 64), "stage_blocks": (1, 2),
    },
    Sm90PatchEmbedConfig: {"warpgroups": (1, 2, 3), "stage_blocks": (1, 2, 3, 4), "cluster": (1, 2)},
    Sm90ImagesConfig: {"warpgroups": (0, 1, 2, 3), "cluster": (0, 1, 2), "stage_blocks": (0, 1, 2)},
    Sm90GatherConfig: {"row_patches": (0, 1, 2, 4), "tile_n": (0, 64, 128, 192, 256), "cluster": (0, 1, 2, 4)},
    Sm100ImagesConfig: {
        "cta_group": (0, 1, 2), "accumulators": (0, 1, 2), "tmem_load_width": (16, 32), "stage_blocks": (1, 2),
    },
    Sm100GemmConfig: {
        "block_m": (128, 256), "tile_n": (64, 128, 256), "cluster_m": (2, 4), "cluster_n": (1, 2),
        "accumulators": (1, 2),
    },
    Sm90GemmConfig: {
        "tile_m": (64, 128, 192, 256), "tile_n": (64, 128, 192, 256), "cluster_m": (1, 2, 4),
        "cluster_n": (1, 2, 4), "split_k": (1, 2, 4, 8),
    },
    Sm80GemmConfig: _SM80,
    Sm80PatchEmbedConfig: _SM80,
    Sm80ImagesConfig: _SM80 | {"tile_images": (1, 8)},
}  # fmt: skip

_CHOSEN = "chosen for the problem"
_TWO_TILES = "two tiles' worth, or what fits"

MEANINGS: dict[type, dict[str, str]] = {
    Sm100PatchEmbedConfig: {"tile_positions": _CHOSEN},
    Sm90PatchEmbedConfig: {"stages": _TWO_TILES},
    Sm100ResidentConfig: {
        "stages": _TWO_TILES,
        **dict.fromkeys(
            ("tile_rows", "tile_positions", "cta_group", "accumulators", "part_columns", "tmem_load_width"), _CHOSEN
        ),
    },
    Sm90ImagesConfig: {
        "stages": _TWO_TILES,
        **dict.fromkeys(("tile_patches", "tile_images", "warpgroups", "cluster", "stage_blocks"), _CHOSEN),
    },
    Sm90GatherConfig: {
        "stages": "what fits, up to 8",
        "store_stages": "two, or what divides a tile",
        **dict.fromkeys(("tile_patches", "tile_rows", "tile_images", "row_patches", "tile_n", "cluster"), _CHOSEN),
    },
    Sm100ImagesConfig: {
        "stages": _TWO_TILES,
        **dict.fromkeys(("tile_patches", "tile_images", "cta_group", "accumulators", "part_columns"), _CHOSEN),
    },
}
"""What a default of 0 stands for, by class of tunables and field."""

KINDS = {name: PLANNERS[name.replace("-", "_")].configs for name in ("patch-embed", "patch-embed-images", "gemm")}
"""Of each kernel, the class of its tunables by architecture; where problems decide, the first class."""

_PROBLEMS_OF = {Sm90GatherConfig: ", bf16 and fp16"}
"""Of classes that are not an architecture's first, which problems they are for."""

DEFAULT_ARCH = "sm_100a"
"""Of a command without ``--arch``, if the kernel exists for it; otherwise the kernel's first."""


MOST_EMULATED = 64
"""Tiles of a problem that a command executes in the emulator without being asked to."""


def tiles_of(plan: Plan) -> int:
    """Of the kernel of a plan that has the most."""
    return max(getattr(part, "tiles", 1) for part in plan.launches)


def count(text: str) -> int:
    """A positive integer, as argparse's ``type``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


# --- tunables --------------------------------------------------------------------------------------------------------


def add_kernel(parser: argparse.ArgumentParser, *kernels: str) -> None:
    """``--arch`` and ``--set`` for these kernels; the plan judges the values."""
    lines = []
    for kernel in kernels:
        archs_of: dict[Target, list[str]] = {}
        for arch, target in _targets(kernel).items():
            archs_of.setdefault(target, []).append(arch)
        for arch, target in ((", ".join(archs), target) for target, archs in archs_of.items()):
            for kind in (*target.configs, *(other.config for other in target.others)):
                tunables = ", ".join(_describe(kind, field) for field in dataclasses.fields(kind))
                lines.append(f"{kernel}, {arch}{_PROBLEMS_OF.get(kind, '')} ({kind.__name__}): {tunables}.")
            if target.fallback is not None:
                lines.append(f"{kernel}, {arch}, where rows of patches are laid out first: those of patch-embed.")
                for kind in (kind for kind in target.fallback.also if kind not in PLANNERS["patch_embed"].kinds):
                    tunables = ", ".join(_describe(kind, field) for field in dataclasses.fields(kind))
                    lines.append(f"Or, of these and the pass ({kind.__name__}): {tunables}.")
    group = parser.add_argument_group("the kernel", " ".join(lines))
    archs = dict.fromkeys(arch for kernel in kernels for arch in KINDS[kernel])
    defaults = {kernel: _default_arch(kernel) for kernel in kernels}
    common = defaults[kernels[0]]
    others = "".join(f", of {kernel} {arch}" for kernel, arch in defaults.items() if arch != common)
    group.add_argument("--arch", choices=tuple(archs), help=f"target architecture (default: {common}{others})")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="settings",
        help="a tunable of the kernel, any number of times; the others keep the values above. Without any, the plan "
        "chooses for the problem. Of several kernels for the same problems the first is taken that has all of them",
    )


def _describe(config: type, field: dataclasses.Field) -> str:
    kind = typing.get_type_hints(config)[field.name]
    choices = CHOICES[config].get(field.name, (True, False) if kind is bool else typing.get_args(kind))
    meaning = MEANINGS.get(config, {}).get(field.name, "")
    default = f"{field.name}={spell(field.default)}" + (f" ({meaning})" if meaning else "")
    return f"{default} of {{{', '.join(map(spell, choices))}}}" if choices else default


def _targets(kernel: str) -> Mapping[str, Target]:
    return PLANNERS[kernel.replace("-", "_")].targets


def _default_arch(kernel: str) -> str:
    return DEFAULT_ARCH if DEFAULT_ARCH in KINDS[kernel] else next(iter(KINDS[kernel]))


def arch_of(options: argparse.Namespace, kernel: str) -> str:
    """The architecture of ``--arch``, or the kernel's default.

    Raises:
        ValueError: the kernel does not exist for it.
    """
    arch = options.arch or _default_arch(kernel)
    if arch not in KINDS[kernel]:
        raise ValueError(f"--arch {arch}: allowed for {kernel}: {', '.join(KINDS[kernel])}")
    return arch


def config_of(options: argparse.Namespace, kernel: str, problem: Any) -> Any:
    """The configuration of ``--arch`` and ``--set``; None, for the plan's choice, without ``--set``.

    Args:
        options: with `add_kernel`.
        kernel: its name.
        problem: what it is to compute: on one architecture, problems may differ in their tunables.

    Raises:
        ValueError: a setting that is no FIELD=VALUE, an unknown field, a value of another type, or a field set twice.
    """
    arch = arch_of(options, kernel)
    target = _targets(kernel)[arch]
    kind = target.of(problem).config
    if target.fallback is not None and options.settings:
        usual = (kind, target.reading(problem).config, target.fallback.config)
        others = (other for other in target.fallback.also if _has_all(other, options.settings))
        other = None if any(_has_all(one, options.settings) for one in usual) else next(others, None)
        if other is not None:
            return parse_settings(other, options.settings, arch)
    if target.fallback is not None and kind is target.fallback.config:
        reading = target.reading(problem).config
        if not _asks_for(reading, kind, options.settings):
            return parse_settings(kind, options.settings, f"{arch}, rows of patches")
        kind = reading
    elif target.also and options.settings:
        kind = _named(target, options.settings)
    return parse_settings(kind, options.settings, arch + _PROBLEMS_OF.get(kind, ""))


def _named(target: Target, settings: Sequence[str]) -> type:
    """Of the classes for the same problems, the first that has all tunables of the settings, or the first of all."""
    return next((kind for kind in target.configs if _has_all(kind, settings)), target.config)


def _has_all(kind: type, settings: Sequence[str]) -> bool:
    return all(_has(kind, setting) for setting in settings)


def _has(kind: type, setting: str) -> bool:
    """Whether a class has the field of a setting and, where it is one of several words, the word."""
    name, _, value = (part.strip() for part in setting.partition("="))
    name = name.replace("-", "_")
    hints = typing.get_type_hints(kind)
    words = typing.get_args(hints.get(name))
    return name in {field.name for field in dataclasses.fields(kind)} and (not words or value in words)


def _asks_for(kind: type, other: type, settings: Sequence[str]) -> bool:
    """Whether settings name tunables of ``kind`` alone, and some that ``other`` does not have."""
    named = {setting.partition("=")[0].strip().replace("-", "_") for setting in settings}
    fields, others = ({field.name for field in dataclasses.fields(config)} for config in (kind, other))
    return named <= fields and not named <= others


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
    add("--row-scale", action="store_true", help="a factor of the scale for every row of x")
    add("--feature-scale", action="store_true", help="a factor of the scale for every feature")

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

    add = problems.group("gemm", "patch-embed-images")
    add(
        "--in-dtype",
        choices=(*dtypes, "uint8"),
        help="element type of a gemm's operands (default: bfloat16; float32 is multiplied as TF32), or of the images "
        "(default: uint8 with int8, otherwise that of --precision)",
    )
    add("--out-dtype", choices=dtypes, default="bfloat16", help="default: %(default)s")


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
    sizes = (options.m, options.n, options.k, options.batches)
    return GemmProblem(*sizes, options.in_dtype or "bfloat16", options.out_dtype, options.bias, options.activation)


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
