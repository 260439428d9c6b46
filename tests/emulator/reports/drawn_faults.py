"""Faults that a generator draws in kernels of `programs`, and by rule what has to be named of each.

A fault is an operator at a place: a wait is dropped, its parity turned, a count raised .. Its rule follows from these
two alone, and is known before the fault is run: expressions that the report's help has to contain, with names of
mbarriers and ``FILE:LINE`` of the place. ``python -m tests.emulator.reports.drawn_faults --seed 1 --count 99`` draws,
runs and judges; ``--held-out`` takes the kernels that no row of causes was written for. Rows were written by faults
of `PROGRAMS`. Of `HELD_OUT`, run once afterwards with seed 4 and count 48, all 48 are reported, and of 42 the mend is
named (30 of the first 35), of some among alternatives. Before, relay_sm90 and turns_sm90 were such kernels: of their
faults (seed 3, count 60) 54 were reported and 44 named (28 of the first 35).
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.reports.planted_causes import report, source_of

PROGRAMS = ("attention_sm90", "chain_sm100", "cluster_sums", "double_sm80", "tickets_sm90", "relay_sm90", "turns_sm90")
HELD_OUT = ("halves_sm90", "spread_sm90")
_MISSING = r"(not waited|wait is missing|without waiting|waited for no mbarrier|missing wait)"
_STAGES = (
    r"(stages differ|another stage|of the same stage|other stage|not the one of this step|a later step|does not adv)"
)
_WRONG = r"(wrong mbarrier|names? (the|this|its|an) mbarrier|arrival or commit names)"


@dataclass(frozen=True)
class Drawn:
    """A fault: its source, and expressions that the help has to match, all of them."""

    program: str
    name: str
    source: str
    rule: tuple[str, ...]

    def named(self, text: str) -> bool:
        """Whether a report's kind and help name the mend."""
        return all(re.search(each, text, re.S | re.I) for each in self.rule)


@dataclass(frozen=True)
class _Program:
    """A program, its lines and its tree."""

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str) -> _Program:
        text = source_of(name)
        return cls(name, text, ast.parse(text))

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Where each line starts, in bytes, as `ast` counts columns. `ast.get_source_segment` looks for it anew."""
        return [0, *itertools.accumulate(map(len, self._bytes.splitlines(keepends=True)))]

    @functools.cached_property
    def _bytes(self) -> bytes:
        return self.text.encode()

    def code(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self._bytes[first:last].decode()

    def span(self, node: ast.AST) -> tuple[int, int]:
        starts = self._starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def replaced(self, *changes: tuple[ast.AST, str]) -> str:
        """With nodes replaced by texts."""
        text = self.text.encode()
        for (first, last), new in sorted(((self.span(node), new) for node, new in changes), reverse=True):
            text = text[:first] + new.encode() + text[last:]
        return text.decode()

    def rings(self) -> dict[str, str]:
        """Arrays of mbarriers, and how many there are of each."""
        found = re.findall(r"(\w+) = cute\.arch\.alloc_smem\(cutlass\.Int64, (\w+)\)", self.text)
        return dict(found)

    def at(self, node: ast.AST) -> str:
        return rf"{self.name}\.py:{node.lineno}\b"


def faults(name: str) -> list[Drawn]:
    """All faults of a program that the operators give."""
    program = _Program.of(name)
    found = []
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Call):
            call = program.code(node.func).rpartition(".")[2]
            for operator, source, rule in _of_call(program, node, call):
                place = f"line {node.lineno}, {call}"
                found.append(Drawn(name, f"{operator} ({place})", source, rule))
        if isinstance(node, ast.For):
            found += [
                Drawn(name, f"{operator} (line {node.lineno}, for)", source, rule)
                for operator, source, rule in _of_loop(program, node)
            ]
        if isinstance(node, ast.Subscript):
            found += [
                Drawn(name, f"{operator} (line {node.lineno}, {program.code(node.value)})", source, rule)
                for operator, source, rule in _of_subscript(program, node)
            ]
    return sorted(found, key=lambda each: each.name)


_Fault = tuple[str, str, tuple[str, ...]]


def _of_call(program: _Program, node: ast.Call, call: str) -> Iterator[_Fault]:
    operators: dict[str, Callable[[_Program, ast.Call], Iterator[_Fault]]] = {
        "mbarrier_wait": _of_wait, "mbarrier_arrive": _of_signal, "commit": _of_signal,
        "mbarrier_arrive_and_expect_tx": _of_announcement, "mbarrier_init": _of_init, "copy": _of_copy,
        "store_async_dsmem": _of_copy,
    }  # fmt: skip
    if call in operators:
        yield from operators[call](program, node)
    elif call in _DROPPED:
        yield f"drop {call}", program.replaced((node, "None")), (_DROPPED[call],)
    if call.endswith("wait_group") and isinstance(node.args[0], ast.Constant):
        new = str(node.args[0].value + 1)
        rule = (r"wait_group", "smaller number|wait_group.0")
        yield "one more in flight", program.replaced((node.args[0], new)), rule
    if call in ("barrier", "barrier_arrive"):
        number, threads = (each.value for each in node.keywords)
        yield (
            "other barrier",
            program.replaced((number, f"{program.code(number)} + 4")),
            (r"named barrier", program.at(node) + "|id"),
        )
        yield (
            "more threads",
            program.replaced((threads, f"{program.code(threads)} + 32")),
            (r"number_of_threads|same number of threads",),
        )


_DROPPED = {
    "fence_proxy": r"fence_proxy", "fence_view_async_tmem_load": r"wait::ld|tmem_load",
    "mbarrier_init_fence": r"mbarrier_init_fence", "sync_warp": r"sync_warp",
    "commit_group": r"commit_group\(\) is missing", "cp_async_commit_group": r"commit_group\(\) is missing",
    "wait_group": r"wait_group", "cp_async_wait_group": r"wait_group", "cp_async_bulk_wait_group": r"wait_group",
    "cp_async_bulk_commit_group": r"commit_group\(\) is missing",
    "sync_threads": r"sync_threads|barrier of (both|all)",
    "barrier": r"barrier is missing|barrier of (both|all)|barrier_id",
    "barrier_arrive": r"barrier_arrive|others have to come", "cluster_wait": r"cluster_wait",
    "cp_async_mbarrier_arrive_noinc": r"arrival is missing|arrive",
}  # fmt: skip


def _barrier(program: _Program, node: ast.expr) -> tuple[str, ast.expr | None]:
    """Name of the array, and the node of the index in it."""
    if isinstance(node, ast.BinOp):
        return program.code(node.left), node.right
    return program.code(node), None


def _stage(program: _Program, ring: str, index: ast.expr | None, where: tuple[str, ...]) -> Iterator[_Fault]:
    count = program.rings().get(ring, "1")
    if index is not None and count != "1" and not program.code(index).startswith("("):
        yield f"wrong stage of {ring}", program.replaced((index, f"({program.code(index)} + 1) % {count}")), where


def _of_wait(program: _Program, node: ast.Call) -> Iterator[_Fault]:
    ring, index = _barrier(program, node.args[0])
    parity = program.code(node.args[1])
    named = rf"\b{ring}\b"
    yield (
        f"drop wait for {ring}",
        program.replaced((node, "None")),
        (_MISSING, f"{named}|waited for no mbarrier|wait is mi"),
    )
    here = f"{program.at(node)}|{named}"
    turned = parity[1:].partition(") ^ 1")[0] if ") ^ 1" in parity else f"({parity}) ^ 1"
    yield f"parity of {ring}", program.replaced((node.args[1], turned)), (r"parity", here)
    if "//" in parity:
        constant = "1" if ") ^ 1" in parity else "0"
        yield f"parity of {ring} stays", program.replaced((node.args[1], constant)), (r"parity", here)
        yield (
            f"parity of {ring} changes in every turn of the loop",
            program.replaced((node.args[1], re.sub(r"// \w+ ", "", parity))),
            (r"parity", here),
        )
    yield from _stage(program, ring, index, (_STAGES, here))
    for other in program.rings():
        if other != ring and program.rings()[other] == program.rings().get(ring):
            yield (
                f"waits for {other} instead of {ring}",
                program.replaced((node.args[0], program.code(node.args[0]).replace(ring, other, 1))),
                (f"{_WRONG}|{_MISSING}", f"{program.at(node)}|{named}"),
            )
    yield from _moved(program, node, 1, (f"{_MISSING}|behind|before", f"{program.at(node)}|{named}"))


def _of_signal(program: _Program, node: ast.Call) -> Iterator[_Fault]:
    ring, index = _barrier(program, node.args[0])
    named, word = rf"\b{ring}\b", "arrival" if "arrive" in program.code(node.func) else "commit"
    yield (
        f"drop {word} at {ring}",
        program.replaced((node, "None")),
        (r"arrival is missing|commit is missing|tcgen05.commit behind", f"{named}|{word}"),
    )
    yield from _stage(program, ring, index, (_STAGES, f"{named}|{program.at(node)}"))
    for other in program.rings():
        if other != ring and program.rings()[other] == program.rings().get(ring):
            yield (
                f"signals {other} instead of {ring}",
                program.replaced((node.args[0], program.code(node.args[0]).replace(ring, other, 1))),
                (_WRONG, named),
            )
    if len(node.args) > 1:
        source = program.text.encode()
        last = program.span(node.args[1])[1]
        alone = source[: program.span(node.args[0])[1]] + source[last:]
        yield (
            f"{word} at {ring} of the own CTA alone",
            alone.decode(),
            (r"mask|rank|each CTA|all CTAs|of the CTA", f"{named}|{program.at(node)}"),
        )
    yield from _moved(program, node, -1, (r"early|behind|in front|before", f"{named}|{program.at(node)}"))


def _of_announcement(program: _Program, node: ast.Call) -> Iterator[_Fault]:
    ring, index = _barrier(program, node.args[0])
    named, count = rf"\b{ring}\b", program.code(node.args[1])
    here = f"{named}|{program.at(node)}"
    yield f"drop announcement at {ring}", program.replaced((node, "None")), (r"expect_tx|announce", named)
    yield (
        f"twice the bytes at {ring}",
        program.replaced((node.args[1], f"2 * ({count})")),
        (r"too much is announced", here),
    )
    yield (
        f"half the bytes at {ring}",
        program.replaced((node.args[1], f"({count}) // 2")),
        (r"too few bytes|has to announce|announces? the bytes|takes the bytes", here),
    )
    arrive = program.code(node.func).replace("_and_expect_tx", "")
    yield (
        f"arrival without bytes at {ring}",
        program.replaced((node, f"{arrive}({program.code(node.args[0])})")),
        (r"expect_tx|announce", here),
    )
    yield from _stage(program, ring, index, (_STAGES, here))


def _of_init(program: _Program, node: ast.Call) -> Iterator[_Fault]:
    ring, _ = _barrier(program, node.args[0])
    count = program.code(node.args[1])
    named = rf"\b{ring}\b"
    yield (
        f"count of {ring} plus 1",
        program.replaced((node.args[1], f"{count} + 1")),
        (r"count", "too high|mbarrier_init", named),
    )
    if count != "1":
        yield (
            f"half the count of {ring}",
            program.replaced((node.args[1], f"{count} // 2")),
            (r"count", "too low|mbarrier_init|number of", named),
        )


def _of_copy(program: _Program, node: ast.Call) -> Iterator[_Fault]:
    at = program.at(node)
    keywords = {each.arg: each.value for each in node.keywords}
    bar = keywords.get("mbar_ptr") or keywords.get("tma_bar_ptr")
    if program.code(node.func).endswith("dsmem"):
        bar = node.args[2]
    if bar is None:
        return
    ring, index = _barrier(program, bar)
    named = rf"\b{ring}\b"
    yield (
        f"drop copy for {ring}",
        program.replaced((node, "None")),
        (r"copy is missing|no copy|has to be issued", named),
    )
    yield from _stage(program, ring, index, (_STAGES + "|mbarrier of its own stage", f"{named}|{at}"))
    for other in program.rings():
        if other != ring and program.rings()[other] == program.rings().get(ring):
            yield (
                f"copy signals {other} instead of {ring}",
                program.replaced((bar, program.code(bar).replace(ring, other, 1))),
                (f"{_WRONG}|mbarrier of its own", f"{named}|{at}"),
            )
    if "mcast_mask" in keywords:
        yield f"mask of one CTA for {ring}", program.replaced((keywords["mcast_mask"], "Int16(1)")), (r"mask", at)
        yield (
            f"mask of the own CTA for {ring}",
            program.replaced((keywords["mcast_mask"], "Int16(1 << rank)")),
            (r"mask", at),
        )


def _of_loop(program: _Program, node: ast.For) -> Iterator[_Fault]:
    call = node.iter
    if not isinstance(call, ast.Call) or program.code(call.func) != "cutlass.range":
        return
    count = program.code(call.args[0])
    loop = (r"loop|trips|turns|ended|exited",)
    yield "one turn less", program.replaced((call.args[0], f"{count} - 1")), loop
    yield "one turn more", program.replaced((call.args[0], f"{count} + 1")), loop


def _of_subscript(program: _Program, node: ast.Subscript) -> Iterator[_Fault]:
    """Another stage of what an access or a copy names."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    last = parts[-1]
    rings = {
        program.code(call.args[0].right): program.rings().get(program.code(call.args[0].left), "1")
        for call in ast.walk(program.tree)
        if isinstance(call, ast.Call)
        and call.args
        and program.code(call.func).startswith("cute.arch.mbarrier")
        and isinstance(call.args[0], ast.BinOp)
    }
    if program.name == "double_sm80":
        rings |= {"use": "2", "next_": "2"}
    if isinstance(last, ast.Name) and (count := rings.get(last.id, "1")) != "1":
        yield (
            "other stage",
            program.replaced((last, f"({last.id} + 1) % {count}")),
            (f"{_STAGES}|index|for another stage|smaller number", program.at(node)),
        )


def _moved(program: _Program, node: ast.Call, by: int, rule: tuple[str, ...]) -> Iterator[_Fault]:
    """The statement of a call, with what is around it alone, changes places with the one before or behind."""
    for parent in ast.walk(program.tree):
        for field in ("body", "orelse"):
            body = getattr(parent, field, None)
            if not isinstance(body, list):
                continue
            for index, statement in enumerate(body):
                inside = statement
                while isinstance(inside, (ast.With, ast.If)) and len(inside.body) == 1:
                    inside = inside.body[0]
                if isinstance(inside, ast.Expr) and inside.value is node and 0 <= index + by < len(body):
                    other = body[index + by]
                    if not isinstance(other, (ast.Expr, ast.For, ast.With)):
                        return
                    first, last = sorted((statement, other), key=lambda each: each.lineno)
                    source = program.replaced((first, program.code(last)), (last, program.code(first)))
                    way = "behind" if by > 0 else "in front of"
                    yield f"{way} line {other.lineno}", source, rule
                    return


def drawn(seed: int, count: int, names: tuple[str, ...] = PROGRAMS) -> list[Drawn]:
    """So many faults, as many of each program as there are."""
    generator = random.Random(seed)
    pools = [faults(name) for name in names]
    for pool in pools:
        generator.shuffle(pool)
    found = [pool[turn] for turn in range(max(map(len, pools))) for pool in pools if turn < len(pool)]
    return found[:count]


def judge(fault: Drawn) -> tuple[str, str]:
    """Outcome ("named", "not named", "silent", "no fault"), and the help."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = report(fault.source, fault.program, Path(folder))
        except AssertionError:
            return "silent", ""
    if found is None:
        return "no fault", ""
    help_ = found.help.replace(f"{folder}/", "")
    return ("named" if fault.named(help_) else "not named"), f"[{found.kind}] {found.sentence} HELP: {help_}"


def main() -> None:
    """Draws, runs and judges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=99)
    parser.add_argument("--held-out", action="store_true", help="the kernels that no row was written for")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    for fault in drawn(options.seed, options.count, HELD_OUT if options.held_out else PROGRAMS):
        key = f"{fault.program}: {fault.name}"
        if options.list:
            print(key, fault.rule)
            continue
        try:
            outcome, help_ = judge(fault)
        except Exception as error:
            outcome, help_ = "error", f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"fault": key, "outcome": outcome, "rule": fault.rule, "help": help_}), flush=True)


if __name__ == "__main__":
    main()
