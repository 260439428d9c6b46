"""Runs a mutant under several schedules until one notices it."""

import ast
import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path

from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation.mutants import Mutant
from cute_kernels.emulator.checking.mutation.target import Target
from cute_kernels.emulator.errors import EmulatorError, UnsupportedPTX
from cute_kernels.emulator.isa.ptx.source_lines import directives
from cute_kernels.emulator.reports.diagnosis import diagnose
from cute_kernels.emulator.reports.sources import nodes, syntax_tree

#: A mutant that executes this many times the instructions of the original, plus a constant, counts as a hang.
LIMIT_FACTOR, LIMIT_CONSTANT = 6, 200_000
_LAUNCHES = 2  # where the order between launches is at stake; elsewhere a second one would show nothing more


@dataclass(frozen=True)
class Verdict:
    """Fate of a mutant."""

    target: str
    key: str
    mutation: str
    opcode: str
    line: int
    following: str  # opcodes of the next two instructions that synchronise
    original: str
    place: str  # DSL source of the mutated instruction, see `place_of`
    # kind of the fault that the emulator reported, as ``emulate`` names it, ``"wrong result"``, or "" if it survived
    # every schedule
    killer: str = ""
    schedule: str = ""  # under which it was killed
    message: str = ""  # first line of the error
    seconds: float = 0.0  # of emulation and translation

    @property
    def survived(self) -> bool:
        return not self.killer

    @property
    def killed(self) -> bool:
        return bool(self.killer) and not self.refused

    @property
    def refused(self) -> bool:
        """Neither killed nor survived: the emulator does not know the mutant's instruction."""
        return self.killer == UnsupportedPTX.kind


def instruction_limits(target: Target, schedules: dict[str, Options]) -> dict[str, int]:
    """Most warp instructions that a mutant may execute under each schedule; checks that the original is clean. Raises
    EmulatorError, AssertionError: the kernel itself is reported or gives a wrong result."""
    limits = {}
    for name, options in schedules.items():
        outcome = target.run(target.ptx, options, _LAUNCHES)
        assert not outcome.difference, f"the unchanged kernel under {name}: {outcome.difference}"
        limits[name] = LIMIT_FACTOR * outcome.warp_instructions + LIMIT_CONSTANT
    return limits


def judge(
    name: str,
    target: Target,
    mutant: Mutant,
    schedules: dict[str, Options],
    limits: dict[str, int],
    roles: tuple[str, ...] = (),
) -> Verdict:
    """Runs the mutant under each schedule in turn and stops at the first that notices it, or stands for all others.

    ``roles`` as for `place_of`.
    """
    start = time.perf_counter()
    verdict = verdict_on(name, target.ptx, mutant, roles)
    for schedule, options in schedules.items():
        limited = dataclasses.replace(options, max_warp_instructions=limits[schedule])
        try:
            repeat = _LAUNCHES if mutant.opcode.startswith("griddepcontrol") else 1
            outcome = target.run(mutant.ptx, limited, repeat)
            message = outcome.difference
            killer = "wrong result" if message else ""
            if outcome.certified and not killer:
                break  # no other schedule can notice it
        except EmulatorError as error:
            internal = type(error) is EmulatorError and "internal error" in str(error)
            error.attach(mutant.ptx)
            killer, message = "internal error" if internal else diagnose(error).kind, str(error).splitlines()[0]
        if killer:
            seconds = time.perf_counter() - start
            return dataclasses.replace(verdict, killer=killer, schedule=schedule, message=message, seconds=seconds)
    return dataclasses.replace(verdict, seconds=time.perf_counter() - start)


def verdict_on(name: str, ptx: str, mutant: Mutant, roles: tuple[str, ...] = ()) -> Verdict:
    """A verdict without its outcome, on a mutant of a text; ``roles`` as for `place_of`."""
    facts = {each: getattr(mutant, each) for each in ("key", "mutation", "opcode", "line", "following", "original")}
    return Verdict(target=name, place=place_of(ptx, mutant.line, roles), **facts)


def source_of(ptx: str, line: int) -> tuple[str, int] | None:
    """File and line of the DSL source of a PTX line, or None where the text does not say."""
    places = _sources(ptx, line)
    return places[-1] if places else None


def place_of(ptx: str, line: int, roles: tuple[str, ...] = ()) -> str:
    """DSL source of a PTX line: ``file:line (function)``, and if that is a helper's the last line of another file.
    ``ptx``: PTX text. ``line``: 1-based. ``roles``: ends of the names of files with the code of warp roles. Helpers
    such as a pipeline's wait are inlined, and their line numbers alone do not say in which role."""
    places = _sources(ptx, line)
    if not places:
        return ""
    *before, here = places
    others = [place for place in before if place[0] != here[0] and place[0].endswith(roles)]
    if here[0].endswith(roles) or not others:
        return _describe(*here)
    return f"{_describe(*here)} in {_describe(*others[-1])}"


def _sources(ptx: str, line: int) -> list[tuple[str, int]]:
    """Places of the source up to a PTX line, the last one its own."""
    known = [each for each in directives(ptx)[:line] if each is not None]
    # Column 0 is the kernel as a whole.
    return [(each.place.path, each.place.line) for each in known if each.column and each.place.line]


def _describe(path: str, line: int) -> str:
    name = path.rsplit("/kernels/", 1)[-1]
    name = name if name != path else Path(path).name
    return f"{name}:{line} ({_function(path, line)})"


@functools.lru_cache(maxsize=4096)
def _function(path: str, line: int) -> str:
    """Qualified name of the innermost function around a line, which outlives edits that move the line."""
    tree = syntax_tree(path)
    if tree is None:  # made somewhere else, or of another language
        return "?"
    around = [n for n in nodes(tree, *_SCOPES) if n.lineno <= line <= n.end_lineno]
    if not any(isinstance(node, ast.FunctionDef) for node in around):
        return "module"
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


_SCOPES = (ast.ClassDef, ast.FunctionDef)
