"""Mutants of Python source, by the operators of Cosmic Ray and ours, without those that no program notices."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from tests.source_mutation.operators import OPERATORS, changes


@dataclass(frozen=True)
class Place:
    """Where an operator applies.

    Attributes:
        path: of the file, in the repository.
        operator: name of the operator, of Cosmic Ray or of `operators`.
        occurrence: which of the places in the file where it applies.
        line: number of the line, from 1.
    """

    path: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True)
class Mutant(Place):
    """One change of one file.

    Attributes:
        before, after: the lines that differ, stripped.
    """

    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def places(root: Path, sources: tuple[str, ...]) -> Iterator[Place]:
    """Where the files can be changed, in a fixed order."""
    for source in sources:
        top = root / source
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            yield from _of_file(path.read_text(), str(path.relative_to(root)))


def mutant_at(root: Path, place: Place) -> Mutant:
    """The change, in words."""
    text = (root / place.path).read_text()
    return Mutant(**vars(place), **dict(zip(("before", "after"), _difference(text, mutated(text, place)), strict=True)))


def mutated(text: str, place: Place) -> str:
    """The text of the file with the change.

    Raises:
        ValueError: the operator does not apply there.
    """
    if place.operator in OPERATORS:
        return changes(text, place.operator)[place.occurrence].applied(text)
    changed = mutate_code(text, cosmic_ray.plugins.get_operator(place.operator)(), place.occurrence)
    if changed is None:
        raise ValueError(f"{place} cannot be changed")
    return changed


def _of_file(text: str, path: str) -> Iterator[Place]:
    annotations = _annotations(text)
    for name in OPERATORS:
        for occurrence, change in enumerate(changes(text, name)):
            if not any(begin <= change.start < end for begin, end in annotations):
                yield Place(path, name, occurrence, change.start[0])
    tree = get_ast(text)
    for name in sorted(cosmic_ray.plugins.operator_names()):
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue  # replacements of variables, which have to be named
        found = (position for node in ast_nodes(tree) for position in kind().mutation_positions(node))
        for occurrence, (start, _) in enumerate(found):
            if not any(begin <= start < end for begin, end in annotations):
                yield Place(path, name, occurrence, start[0])


def _annotations(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations stand: nobody evaluates them."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += [node.returns] if node.returns else []
        elif isinstance(node, ast.arg):
            found += [node.annotation] if node.annotation else []
        elif isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
    return [((e.lineno, e.col_offset), (e.end_lineno or 0, e.end_col_offset or 0)) for e in found]


def _difference(before: str, after: str) -> tuple[str, str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[3:]
    removed, added = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return " ".join(removed), " ".join(added)
