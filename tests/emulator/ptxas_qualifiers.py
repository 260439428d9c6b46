"""What ptxas accepts of opcodes with other qualifiers: ``python -m tests.emulator.ptxas_qualifiers [--seed N]``.

`DATA` has an instruction of every form of an opcode that the emulator executes. Variants of each lose, repeat, swap
or exchange a qualifier, a type too, whose registers get its width. Without ``--record`` the command draws variants with
a seed of its own, asks ptxas (CUDA 13.0 or later) about them, and about the first target and version of PTX that has
each, and prints where the emulator says something else; with it, the verdicts are kept in `DATA`, so that
`ptx/test_qualifiers.py` and `test_targets.py` need no ptxas.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.emulator.isa.ptx import targets
from cute_kernels.emulator.isa.ptx.families import arrange
from cute_kernels.emulator.isa.ptx.operand_syntax import HELD_IN
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS
from cute_kernels.emulator.machine.bytecode.lowering import lower
from tests.emulator.ptxas_operands import OLDER, TARGETS, module, number, since, split, target_of, verdicts

DATA = Path(__file__).parent / "data" / "ptxas_qualifiers.json"
_REGISTER = re.compile(r"%[a-z]+\d*(?:x2)?_(\d)")
_EXCHANGED = 12  # random variants of an instruction

_TESTP = "finite|infinite|number|notanumber|normal|subnormal"
_REPLACE = (
    "global_address|global_stride|global_dim|box_dim|rank|elemtype|element_stride|interleave_layout|swizzle_mode|"
    "fill_mode|swizzle_atomicity"
)
#: What ptxas 13.0 takes and is refused here: expression of the variant, and why. Besides, it reads the words of a name
#: (``redux.sync``) in any order.
BEYOND = {
    rf"(?!testp)\S*\.({_TESTP})\b": "ptxas reads words of testp behind every opcode",
    rf"(?!tensormap)\S*\.({_REPLACE})\b": "it reads those of tensormap.replace, too",
    r"\S*\.pred\b": "it reads .pred behind opcodes that have another type",
    r"\S*\.(sync|satfinite|relu|sat|approx|NaN|cc)\b\S*\.\1\b": "it reads these twice",
    r"(tcgen05\.(ld|st)|wgmma\.\w+)\.sync(?!\S*aligned)": "it does not miss .aligned",
    r"(add|sub|mad)c\.\S*[us]16 ": "numbers of 16 bits have no carry",
    r"(mapa|getctarank)\.u32 |cvta\S*\.u32": "generic addresses have 64 bits",
    r"(div|rcp|sqrt)\.r[zmp]": "directed quotients and roots are not implemented",
    r"w?mma\.\S*\.row\.col(\.(satfinite|r[nzmp]))?(\.[\w:]+){5}": "it does not look at a fifth type",
    r"(cp\.async\.bulk|st\.async)\S*\.(cta|cluster)\b|(ld|st|mov)matrix\S*\.row\b": "it does not look at these",
    r"(add|sub|mad)c?\.\S*\.cc ": "words of a name stand in this order",
    r"fma\.r[zmp]\.bf16": "these round to nearest",
    r"(max|min)\S*\.abs\b(,?[^,]*,){3}|st\.async\.\S*global": "not implemented",
}
#: What ptxas 13.0 refuses and is executed here: expression of the variant, and why.
WIDER = {
    r"ld\S* .*\[p0": "a generic address may be one of a parameter",
    r"cvt\.rn\.\S*(bf16x2.*e\dm\dx2|e\dm\dx2.*bf16x2|e[23]m[23]x2\.f16x2)": "newer than PTX 9.0",
    r"bar\.sync -": "numbers of barriers are looked at when they are known",
    r"(setp|add)\S*bf?16(x2)? .*, -?\d+$": "literals stand for the bits of halves",
    r"multimem\S*f16x2 .*%f32": "of registers of pairs the width alone matters",
}

#: What is newer because of the kind of an operand, which is not looked at: a register of 128 bits, a predicate.
BY_OPERANDS = r"^(?!\S*b128).*%b128|cp\.async.* %pred_\d$"


@functools.cache
def instructions() -> tuple[str, ...]:
    """The instructions that `DATA` has variants of."""
    return tuple(json.loads(DATA.read_text())["verdicts"])


@functools.cache
def rare() -> tuple[str, ...]:
    """Instructions with words that variants seldom have: when each has come is known."""
    return tuple(json.loads(DATA.read_text())["rare"])


@functools.cache
def words() -> tuple[str, ...]:
    """Every qualifier that one of them has."""
    return tuple(sorted({part for each in instructions() for part in each.split()[0].split(".")[1:]}))


def _bits(word: str) -> int:
    return TYPE_BITS.get(HELD_IN.get(word, word), 0)


def _with_registers(operands: str, old: str, new: str) -> str:
    """Operands whose registers of the width of one type have that of another one."""
    before, after = _bits(old), _bits(new)
    if not before or not after:
        return operands

    def changed(match: re.Match[str]) -> str:
        name = match[0][1:].rsplit("_", 1)[0]
        kind = "pred" if after == 1 else f"b{after}"
        return f"%{kind}_{match[1]}" if TYPE_BITS.get(name) == before else match[0]

    return re.sub(r"(?<![\[\w])" + _REGISTER.pattern, changed, operands)


def variants(instruction: str, seed: int) -> list[str]:
    """The instruction and others whose opcodes differ in one qualifier, those of a seed always in the same order."""
    opcode, _, operands = instruction.partition(" ")
    name, *parts = opcode.split(".")
    drawn = random.Random(f"{seed} {instruction}")
    found = [instruction]

    def add(new: Sequence[str], given: str = operands) -> None:
        found.append(f"{'.'.join((name, *new))} {given}".strip())

    for i, part in enumerate(parts):
        add([*parts[:i], *parts[i + 1 :]])
        add([*parts[:i], part, *parts[i:]])
        if i:
            add([*parts[: i - 1], part, parts[i - 1], *parts[i + 1 :]])
    kinds = {kind: [word for word in words() if bool(_bits(word)) == kind] for kind in (False, True)}
    for _ in range(_EXCHANGED):
        i = drawn.randrange(len(parts) + 1)
        if i < len(parts) and drawn.random() < 0.6:
            new = drawn.choice(kinds[bool(_bits(parts[i]))] if drawn.random() < 0.8 else words())
            add([*parts[:i], new, *parts[i + 1 :]])
            add([*parts[:i], new, *parts[i + 1 :]], _with_registers(operands, parts[i], new))
        else:
            add([*parts[:i], drawn.choice(words()), *parts[i:]])
    return list(dict.fromkeys(found))


def first(instruction: str) -> str:
    """What the emulator says that `ptxas_operands.since` is of an instruction."""
    opcode, _, operands = instruction.partition(" ")
    name, count = ".".join(arrange(tuple(opcode.split(".")))[0]), len(split(operands))
    target = next(target for target in (*OLDER, *TARGETS) if not targets.missing(target, name, count))
    versions = targets.SINCE[target.removeprefix("sm_")], targets.first(name, count)[2]
    return f"{target} {max(versions, key=number)}"


def refusal(instruction: str) -> str | None:
    """Why the emulator refuses an instruction before it runs; None: it does not."""
    illegal = arrange(tuple(instruction.split()[0].split(".")))[1]
    if illegal:
        return illegal
    try:
        lowering = lower(module([instruction], target_of(instruction)), "k", (32, 1, 1), check=False, registers=False)
        for block in lowering.flow.blocks:
            lowering.block(block)
    except UnsupportedPTX as error:
        return error.message
    return None


@functools.cache
def _orders() -> frozenset[tuple[str, ...]]:
    """The words of every opcode, sorted."""
    return frozenset(tuple(sorted(each.split()[0].split("."))) for each in instructions())


def explained(variant: str, reason: str | None) -> str:
    """Why the emulator differs from ptxas on purpose, or ""; ``reason``: why it refuses the variant, or None."""
    known = WIDER if reason is None else BEYOND
    found = next((why for expression, why in known.items() if re.match(expression, variant)), "")
    if not found and reason is not None:
        if tuple(sorted(variant.split()[0].split("."))) in _orders():
            return "words of a name stand in this order"
        if "implemented" in reason:
            return "not implemented"
    return found


def _has_a_word_too_many(variant: str) -> bool:
    """Whether it is legal without one of its words: ptxas does not look at all that stand behind all opcodes."""
    parts = variant.split()[0].split(".")
    return any(not arrange((*parts[:i], *parts[i + 1 :]))[1] for i in range(1, len(parts)))


def differences(drawn: Sequence[str], said: str) -> Iterator[tuple[str, str | None]]:
    """(variant, why the emulator refuses it or None) for variants of which ptxas says something else."""
    for variant, verdict in zip(drawn, said, strict=True):
        reason = refusal(variant)
        if (reason is None) != (verdict == "1"):
            yield variant, reason


def main() -> None:
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.ptxas_qualifiers", description=description)
    parser.add_argument("--ptxas", default="ptxas", help="the program (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of what is drawn")
    parser.add_argument("--record", action="store_true", help="keep the verdicts")
    parser.add_argument("--only", default="", help="regular expression of instructions")
    options = parser.parse_args()
    chosen = [each for each in instructions() if re.match(options.only, each)]
    by_target: dict[str, list[str]] = {}
    for each in chosen:
        by_target.setdefault(target_of(each), []).extend(variants(each, options.seed))
    asked = {}
    for target, drawn in by_target.items():
        asked |= dict(zip(drawn, verdicts(options.ptxas, target, drawn)))
    if options.record:
        recorded = {each: "".join(asked[v] for v in variants(each, options.seed)) for each in chosen}
        wrong = [each for each, verdict in recorded.items() if verdict[0] != "1"]
        if wrong or options.only:
            raise SystemExit(f"nothing is recorded: ptxas refuses {wrong}")
        said = subprocess.run([options.ptxas, "--version"], capture_output=True, text=True, check=True).stdout
        version = said.split("release ")[1].split(",")[0]
        having = {target: verdicts(options.ptxas, target, chosen) for target in TARGETS}
        first_of = since(options.ptxas, [*chosen, *rare()])
        kept = {
            "ptxas": version, "seed": options.seed, "targets": having, "verdicts": recorded,
            "since": [first_of[each] for each in chosen], "rare": {each: first_of[each] for each in rare()},
        }  # fmt: skip
        DATA.write_text(json.dumps(kept, indent=0) + "\n")
    found = list(differences(list(asked), "".join(asked.values())))
    unexplained = [(variant, reason) for variant, reason in found if not explained(variant, reason)]
    for variant, reason in unexplained:
        print(f"refused by ptxas: {variant}" if reason is None else f"refused here: {variant} | {reason}")
    for known in sorted({explained(*each) for each in found} - {""}):
        counts = Counter(reason is None for variant, reason in found if explained(variant, reason) == known)
        print(f"{counts[True]} accepted, {counts[False]} refused here: {known}")
    both = [each for each, said in asked.items() if said == "1" and each not in dict(found)]
    ages = [(each, said) for each, said in since(options.ptxas, both).items() if said != first(each)]
    ages = [(each, said) for each, said in ages if not re.search(BY_OPERANDS, each)]
    for each, said in ages:
        print(f"since {said}, here since {first(each)}: {each}")
    refused = list(asked.values()).count("0")
    print(
        f"seed {options.seed}: {len(asked)} variants, {refused} refused by ptxas; {len(unexplained)} differ, and "
        f"{len(ages)} of {len(both)} are older or newer here"
    )
    raise SystemExit(
        bool(ages) or any(reason is None or not _has_a_word_too_many(variant) for variant, reason in unexplained)
    )


if __name__ == "__main__":
    main()
