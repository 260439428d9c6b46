"""Mutants of a PTX text: each drops or weakens one synchronisation instruction and leaves everything else as it is.

A mutant stands for a mistake of a kernel author. Weakenings follow the PTX ISA's grammar, so that a mutant is
legal PTX: `.release` and `.acquire` become `.relaxed`, `.cluster` becomes `.cta`, waits for groups leave one more group
outstanding, parities are inverted, arrival counts and transaction bytes are off by one unit, multicasts reach one CTA.
Waits for an mbarrier are dropped by answering "complete" at once, so that the loops around them still end.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: One statement, on one line as in assembler output: an optional guard, an opcode and its operands.
_STATEMENT = re.compile(
    r"(?P<guard>@!?[%$\w]+\s+)?(?P<opcode>[a-z][a-z0-9]*(?:(?:\.|::)\w+)+|membar|trap)(?:[ \t]+(?P<operands>[^;{}\n]*"
    r"(?:\{[^}\n]*\}[^;{}\n]*)*))?;"
)
_CLUSTER_WAIT = re.compile(r"barrier\.cluster\.wait[.\w]*\s*;")
_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+).*?^}", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

Edit = tuple[str, str]
"""Name of a mutation, and the statement (without its guard) that takes the place of the old one."""

Family = Callable[[str, list[str]], Iterator[Edit]]
"""Edits of an instruction by its opcode and operands."""


@dataclass(frozen=True)
class Mutant:
    """One changed PTX text."""

    mutation: str  # what was done, e.g. ``"drop"``
    opcode: str  # of the instruction it was done to
    ordinal: int  # counts equal (mutation, opcode) pairs of the text from 0, so that the three name a mutant
    line: int  # 1-based line in the PTX text; mutants have the same line numbers as the original
    following: str  # opcodes of the next two instructions of the text that synchronise, fewer at its end
    original: str  # the instruction as written
    ptx: str  # the changed text

    @property
    def key(self) -> str:
        return f"{self.mutation} {self.opcode} #{self.ordinal}"


def mutants_of_kernel(ptx: str, kernel: str) -> list[Mutant]:
    """The mutants of a text that concern one of its kernels: all but those of instructions of other entries."""
    others: set[int] = set()
    for entry in _ENTRY.finditer(ptx):
        if entry["name"] != kernel:
            first = ptx.count("\n", 0, entry.start()) + 1
            others.update(range(first, first + entry.group().count("\n") + 1))
    return [mutant for mutant in mutants(ptx) if mutant.line not in others]


def mutants(ptx: str) -> Iterator[Mutant]:
    """All mutants of a PTX text, in the order of its lines."""
    code = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), ptx)
    seen: Counter[tuple[str, str]] = Counter()
    found = [
        (match, list(_edits(match["opcode"], _split(match["operands"] or "")))) for match in _STATEMENT.finditer(code)
    ]
    found = [(match, edits) for match, edits in found if edits]
    opcodes = [match["opcode"] for match, _ in found]
    for number, (match, edits) in enumerate(found, start=1):
        opcode = match["opcode"]
        texts = [
            (mutation, ptx[: match.start()] + _guarded(match["guard"] or "", replacement) + ptx[match.end() :])
            for mutation, replacement in edits
        ]
        if opcode.startswith("barrier.cluster.arrive") and (wait := _CLUSTER_WAIT.search(code, match.end())):
            both = ptx[: match.start()] + ptx[match.end() : wait.start()] + ptx[wait.end() :]
            texts.append(("drop with its wait", both))
        for mutation, text in texts:
            yield Mutant(
                mutation=mutation,
                opcode=opcode,
                ordinal=seen[mutation, opcode],
                line=ptx.count("\n", 0, match.start()) + 1,
                following=" ".join(opcodes[number : number + 2]),
                original=" ".join(match.group().split()),
                ptx=text,
            )
            seen[mutation, opcode] += 1


def _split(operands: str) -> list[str]:
    """Operands between commas that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(operands):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append(operands[start:i].strip())
            start = i + 1
    parts.append(operands[start:].strip())
    return [part for part in parts if part]


def _guarded(guard: str, replacement: str) -> str:
    """Puts the old guard in front of every statement of the replacement but declarations."""
    if not guard or not replacement:
        return replacement
    statements = [part.strip() for part in replacement.strip("{} ").split(";") if part.strip()]
    guarded = [part if part.startswith(".reg") else f"{guard.strip()} {part}" for part in statements]
    text = "; ".join(guarded) + ";"
    return "{ " + text + " }" if replacement.startswith("{") else text


def _edits(opcode: str, operands: list[str]) -> Iterator[Edit]:
    for prefix, family in _FAMILIES.items():
        if opcode == prefix or opcode.startswith((prefix + ".", prefix + "::")):
            yield from family(opcode, operands)
            return


def _statement(opcode: str, operands: list[str]) -> str:
    return f"{opcode} {', '.join(operands)};" if operands else f"{opcode};"


def _dropped(opcode: str, operands: list[str]) -> Iterator[Edit]:
    yield "drop", ""


def _changed_operand(opcode: str, operands: list[str], index: int, operation: str, kind: str, amount: int) -> str:
    """The statement with ``operand = operation.kind(operand, amount)``, which works for registers and literals."""
    changed = [*operands]
    changed[index] = "mutated"
    return (
        f"{{ .reg .b{kind[1:]} mutated; {operation}.{kind} mutated, {operands[index]}, {amount}; "
        f"{_statement(opcode, changed)} }}"
    )


def _off_by(opcode: str, operands: list[str], index: int, what: str, step: int) -> Iterator[Edit]:
    for amount in (step, -step):
        yield f"{what}{amount:+d}", _changed_operand(opcode, operands, index, "add", "s32", amount)


def _weaker(
    opcode: str, operands: list[str], *, after: tuple[str, ...] = (), default_scope: str = ""
) -> Iterator[Edit]:
    """Semantics and scope, one at a time.

    ``after`` and ``default_scope``: where an instruction with neither qualifier takes them, and the scope that it has
    by default.
    """
    parts = opcode.split(".")
    for strong in ("release", "acquire", "acq_rel"):
        if strong in parts:
            yield "relaxed", _statement(".".join("relaxed" if part == strong else part for part in parts), operands)
    for wide, narrow in (("cluster", "cta"), ("gpu", "cta"), ("sys", "cta")):
        if wide in parts:
            yield f"{wide}->{narrow}", _statement(".".join(narrow if p == wide else p for p in parts), operands)
    if default_scope and not {"release", "acquire", "acq_rel", "relaxed"} & set(parts):
        place = 1 + max(i for i, part in enumerate(parts) if part in after)
        weak = [*parts[:place], "relaxed", default_scope, *parts[place:]]
        yield "relaxed", _statement(".".join(weak), operands)


# --- families -------------------------------------------------------------------------------------------------------


def _counted(index: int, what: str, step: int) -> Family:
    """Instructions with a number that others have to agree with, where they have the operand."""

    def edits(opcode: str, operands: list[str]) -> Iterator[Edit]:
        yield "drop", ""
        if len(operands) > index:
            yield from _off_by(opcode, operands, index, what, step)

    return edits


def _arrive(opcode: str, operands: list[str]) -> Iterator[Edit]:
    yield "drop", ""
    yield from _weaker(opcode, operands, after=("arrive", "arrive_drop", "expect_tx"), default_scope="cta")
    if ".expect_tx" in opcode:
        yield from _off_by(opcode, operands, -1, "bytes", 16)
        yield "arrive without bytes", _statement(opcode.replace(".expect_tx", ""), operands[:-1])


def _wait(opcode: str, operands: list[str]) -> Iterator[Edit]:
    yield "drop", f"setp.eq.b32 {operands[0]}, 0, 0;"
    yield from _weaker(opcode, operands, after=("try_wait", "test_wait", "parity"), default_scope="cta")
    if ".parity" in opcode:
        yield "other parity", _changed_operand(opcode, operands, 2, "xor", "b32", 1)


def _fence(opcode: str, operands: list[str]) -> Iterator[Edit]:
    yield "drop", ""
    for strong in ("acq_rel", "sc"):
        if f".{strong}.cluster" in opcode or f".{strong}.gpu" in opcode:
            yield "->cta", _statement(re.sub(r"\.(cluster|gpu)\b", ".cta", opcode), operands)


def _multicast(mask: int) -> Family:
    """Instructions that reach several CTAs, by the number of the operand that is their mask."""

    def edits(opcode: str, operands: list[str]) -> Iterator[Edit]:
        yield "drop", ""
        for rank in (0, 1) if ".multicast::cluster" in opcode else ():
            yield f"only to CTA {rank}", _changed_operand(opcode, operands, mask, "and", "b16", 1 << rank)

    return edits


def _wait_group(opcode: str, operands: list[str]) -> Iterator[Edit]:
    yield "drop", ""
    yield "one group more", _statement(opcode, [str(int(operands[0]) + 1)])
    if opcode == "cp.async.bulk.wait_group":
        yield "only reads", _statement(opcode + ".read", operands)


def _cluster_arrive(opcode: str, operands: list[str]) -> Iterator[Edit]:
    yield "drop", ""
    if ".relaxed" not in opcode:
        weak = opcode.replace(".release", "")
        yield "relaxed", _statement(weak.replace("barrier.cluster.arrive", "barrier.cluster.arrive.relaxed"), operands)


def _elect(opcode: str, operands: list[str]) -> Iterator[Edit]:
    """The guarded code runs in every lane. The lane's number goes to the sink in code that CuTe DSL generates."""
    value, predicate = operands[0].split("|")
    first = "" if value == "_" else f"mov.b32 {value}, 0; "
    yield "all lanes", f"{{ {first}setp.eq.b32 {predicate}, 0, 0; }}"


_named_barrier = _counted(1, "threads", 32)
_FAMILIES: dict[str, Family] = {
    "mbarrier.init": _counted(1, "count", 1),
    "mbarrier.arrive": _arrive,
    "mbarrier.arrive_drop": _arrive,
    "mbarrier.expect_tx": _counted(-1, "bytes", 16),
    "mbarrier.try_wait": _wait,
    "mbarrier.test_wait": _wait,
    "mbarrier.inval": _dropped,
    "fence": _fence,
    "membar": _fence,
    "tcgen05.wait": _dropped,
    "tcgen05.fence": _dropped,
    "tcgen05.commit": _multicast(1),
    "tcgen05.alloc": _dropped,
    "tcgen05.dealloc": _dropped,
    "tcgen05.relinquish_alloc_permit": _dropped,
    "bar.warp.sync": _dropped,
    "bar.sync": _named_barrier,
    "bar.arrive": _named_barrier,
    "bar.cta": _named_barrier,
    "barrier.sync": _named_barrier,
    "barrier.arrive": _named_barrier,
    "barrier.cta": _named_barrier,
    "barrier.cluster.arrive": _cluster_arrive,
    "barrier.cluster.wait": _dropped,
    "cp.async.bulk.tensor": _multicast(3),
    "cp.async.bulk.commit_group": _dropped,
    "cp.async.bulk.wait_group": _wait_group,
    "cp.async.commit_group": _dropped,
    "cp.async.wait_group": _wait_group,
    "cp.async.wait_all": _dropped,
    "cp.async.mbarrier": _dropped,
    "wgmma.fence": _dropped,
    "wgmma.commit_group": _dropped,
    "wgmma.wait_group": _wait_group,
    "elect.sync": _elect,
    "griddepcontrol": _dropped,
    "ld": _weaker,
    "st": _weaker,
    "atom": _weaker,
    "red": _weaker,
}
