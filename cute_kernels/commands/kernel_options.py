"""Options by which commands name a kernel, a problem and tunables: ``--batch``, ``--arch``, ``--set`` and the like."""

import argparse
import dataclasses
import difflib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from cute_kernels.common.chips import DEFAULT_ARCH
from cute_kernels.plan import ARCHS, PLANNERS, Plan, Planner, make_plan
from cute_kernels.plan.base import CHOSEN, Kernel
from cute_kernels.plan.config_codec import OPEN, parse_settings, spell
from cute_kernels.plan.options import Option

OPERATIONS: dict[str, Planner] = {name.replace("_", "-"): planner for name, planner in PLANNERS.items()}
"""By the name that commands give it."""


def count(text: str) -> int:
    """A positive integer, as argparse's ``type``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


class HelpFormatter(argparse.HelpFormatter):
    """Fills each line of a text by itself, and indents what follows the first row of one of several lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        below = indent + 5 * " " * (len(lines) > 1)
        how = {"initial_indent": indent, "subsequent_indent": below, "break_on_hyphens": False}
        return "\n".join(textwrap.fill(line, width, **how) for line in lines)


def add_kernel(parser: argparse.ArgumentParser, *names: str) -> None:
    """``--arch`` and ``--set`` for the kernels of these operations; the plan judges the values."""
    parser.formatter_class = HelpFormatter
    lines, shown = [f"Fields, their defaults and their legal values; auto: {CHOSEN}."], {}
    for name in names:
        archs: dict[tuple[Kernel, ...], list[str]] = {}
        for arch, kernels in OPERATIONS[name].kernels.items():
            archs.setdefault(kernels, []).append(arch)
        for kernels, arch in ((kernels, ", ".join(those)) for kernels, those in archs.items()):
            for kernel in kernels:
                kind = kernel.config.__name__
                tunables = ", ".join(_describe(kernel, field) for field in dataclasses.fields(kernel.config))
                lines.append(f"{name}, {arch} ({kind}): {f'see {shown[kind]}' if kind in shown else tunables}")
                shown.setdefault(kind, name)
    group = parser.add_argument_group("the kernel", "\n".join(lines))
    archs = dict.fromkeys(arch for name in names for arch in OPERATIONS[name].kernels)
    defaults = {name: _default_arch(name) for name in names}
    common = defaults[names[0]]
    others = "".join(f", of {name} {arch}" for name, arch in defaults.items() if arch != common)
    group.add_argument(
        "--arch", type=_arch, choices=tuple(archs), help=f"target architecture (default: {common}{others})"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="settings",
        help="set a field of the kernel; may be repeated; other fields keep their defaults. The fields choose between "
        "kernels: the one that the problem gets by default, if it has them all, or else the first one that has",
    )


def _arch(text: str) -> str:
    """An architecture, for argparse's ``type``."""
    if text not in ARCHS and f"{text}a" in ARCHS:
        raise argparse.ArgumentTypeError(f"{text}: its kernels need instructions that only {text}a has: --arch {text}a")
    return text


def _describe(kernel: Kernel, part: dataclasses.Field) -> str:
    """``FIELD=DEFAULT``, how an open one is chosen, and the legal values."""
    known = kernel.fields.get(part.name)
    choices = (True, False) if kernel.config.types[part.name][0] is bool else () if known is None else known.legal
    meaning = f" ({known.open})" if part.default is None and known is not None and known.open != CHOSEN else ""
    default = f"{part.name}={spell(part.default)}{meaning}"
    return f"{default} of {{{', '.join(map(spell, choices))}}}" if choices else default


def _default_arch(name: str) -> str:
    kernels = OPERATIONS[name].kernels
    return DEFAULT_ARCH if DEFAULT_ARCH in kernels else next(iter(kernels))


def arch_of(options: argparse.Namespace, name: str) -> str:
    """The architecture of ``--arch``, or the operation's default. Raises ValueError: there is no kernel for it."""
    arch = options.arch or _default_arch(name)
    if arch not in OPERATIONS[name].kernels:
        raise ValueError(f"--arch {arch}: must be one of {', '.join(OPERATIONS[name].kernels)} for {name}")
    return arch


def kernel_of(options: argparse.Namespace, name: str, problem: Any, settings: Sequence[str]) -> Kernel:
    """The kernel that the problem gets, if that has all settings, or the first one that has. Raises ValueError: an
    unknown field, or a problem that no kernel takes."""
    planner, arch = OPERATIONS[name], ARCHS[arch_of(options, name)]
    planner.check(problem)
    usual, _ = planner.usual(problem, arch)
    others = (kernel for kernel in planner.of(arch.name) if kernel is not usual)
    _check_fields(arch.name, (usual, *others), settings)
    named = [kernel for kernel in planner.of(arch.name) if _has_all(kernel, settings)]
    taking = [kernel for kernel in named if not kernel.takes(problem, arch)]
    return usual if usual in named else next(iter((*taking, *named)), usual)


def _check_fields(arch: str, kernels: Sequence[Kernel], settings: Sequence[str]) -> None:
    """Raises ValueError for a setting of a field that none of the kernels has: it names those of all."""
    fields = {kernel.config.__name__: [part.name for part in dataclasses.fields(kernel.config)] for kernel in kernels}
    known = {name for names in fields.values() for name in names}
    for setting in settings:
        name, separator, _ = setting.partition("=")
        if not separator or name.strip().replace("-", "_") not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1) if separator else []
            meant = f"did you mean {near[0]}? " if near else ""
            all_fields = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in fields.items())
            raise ValueError(f"setting {setting}: {meant}must be FIELD=VALUE; fields for {arch}, {all_fields}")


def _has_all(kernel: Kernel, settings: Sequence[str]) -> bool:
    """Whether a kernel has the fields of all settings and, where they are words, the words."""
    for setting in settings:
        name, _, value = (part.strip() for part in setting.partition("="))
        name = name.replace("-", "_")
        kind, is_open = kernel.config.types.get(name, (None, False))
        if kind is None or (kind is str and value not in kernel.fields[name].legal and not (is_open and value == OPEN)):
            return False
    return True


def add_plan(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """The options of the problems and of the kernels of operations, which `plan_of` reads."""
    add_problem(parser, names)
    add_kernel(parser, *names)


def add_planned(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    kernel: str = "default: %(default)s; with --help: show its options alone",
    device: str = "a B200 or H200",
) -> None:
    """`add_plan`, the operation, of which ``kernel`` is the help, and multiprocessors, of which ``device`` has some."""
    parser.add_argument("kernel", nargs="?", choices=tuple(OPERATIONS), default="patch-embed", help=kernel)
    parser.add_argument("--sm-count", type=count, help=f"multiprocessors (default: those of {device})")
    add_plan(parser, names)


def named(arguments: Sequence[str] | None) -> tuple[str, ...]:
    """Operations whose options a command line is about: of one where its help is asked for, else of all. ``arguments``:
    None for those of the process."""
    words = sys.argv[1:] if arguments is None else arguments
    found = tuple(word for word in words if word in OPERATIONS)
    return found if found and {"-h", "--help"} & set(words) else tuple(OPERATIONS)


def add_problem(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(OPERATIONS)) -> None:
    """The options of the problems of operations, which `plan_of` reads; one that is not given is None.

    Those of the same operations are a group.
    """
    owners: dict[str, dict[str, Option]] = {}
    for name in names:
        for option in OPERATIONS[name].options.options:
            owners.setdefault(option.name, {})[name] = option
    sharing = dict.fromkeys(tuple(those) for those in owners.values())
    groups = {those: parser.add_argument_group(f"the problem of {' and '.join(those)}") for those in sharing}
    for those in owners.values():
        _add_option(groups[tuple(those)], those)


def _add_option(group: argparse._ArgumentGroup, owners: dict[str, Option]) -> None:
    """An option that one operation or several have, which may say different things of it."""
    option = next(iter(owners.values()))
    texts = dict.fromkeys(each.text for each in owners.values())
    said = next(iter(texts)) if len(texts) == 1 else ". ".join(f"{name}: {o.text}" for name, o in owners.items())
    kinds: dict[str, Any] = {"type": count} if isinstance(option.default, int) else {}
    if isinstance(option.default, bool):
        kinds = {"action": "store_true"}
    if option.choices:
        kinds = {"choices": tuple(dict.fromkeys(choice for each in owners.values() for choice in each.choices))}
    group.add_argument(option.flag, default=None, help=said, **kinds)


def plan_of(options: argparse.Namespace, sm_count: int | None = None) -> Plan:
    """The plan of a command with `add_plan` for its ``kernel``. Raises ValueError: an option of another kernel, a
    setting that cannot be read, or what the plan refuses."""
    problem, arch, config = problem_of(options), arch_of(options, options.kernel), None
    if options.settings:
        kind = kernel_of(options, options.kernel, problem, options.settings).config
        config = parse_settings(kind, options.settings, f"{arch}, {kind.__name__}")
    try:
        return make_plan(problem, config, arch, sm_count=sm_count)
    except ValueError as reason:
        if f"{arch}a" not in OPERATIONS[options.kernel].kernels:
            raise
        raise ValueError(f"{reason}; --arch {arch}a has other kernels, for the same GPUs") from None


def plan_of_side(options: argparse.Namespace, side: str) -> Plan:
    """The plan of one side of a comparison, which is FIELD=VALUE,.. or default. Raises ValueError: as `plan_of`;
    settings for both sides."""
    if options.settings:
        raise ValueError("--set belongs to commands with one configuration: A and B must be FIELD=VALUE,.. or default")
    own = argparse.Namespace(**{**vars(options), "settings": [] if side == "default" else side.split(",")})
    return plan_of(own, options.sm_count)


def problem_of(options: argparse.Namespace) -> Any:
    """The problem of a command with `add_problem` for its ``kernel``. Raises ValueError: an option of another
    kernel."""
    own = OPERATIONS[options.kernel].options
    values = {option.name: option.default for option in own.options}
    for option in (option for planner in OPERATIONS.values() for option in planner.options.options):
        given = getattr(options, option.name)
        if given is not None and option.name not in values:
            raise ValueError(f"{option.flag} is no option of {options.kernel}")
        if given is not None:
            values[option.name] = given
    return own.problem(**values)
