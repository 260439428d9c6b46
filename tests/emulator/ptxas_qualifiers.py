"""What ptxas accepts of opcodes with other qualifiers: ``python -m tests.emulator.ptxas_qualifiers [--seed N]``.

`DATA` has an instruction of every form of an opcode that the emulator executes. Variants of each lose, repeat, swap
or exchange a qualifier, a type too, whose registers get its width. Without ``--record`` the command draws variants with
a seed of its own, asks ptxas (CUDA 13.0 or later) about them, and prints where the emulator says something else; with
it, the verdicts are kept in `DATA`, so that `ptx/test_qualifiers.py` needs no ptxas.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cute_kernels.emulator import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.operand_syntax import HELD_IN
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS
from cute_kernels.emulator.machine.bytecode.lowering import lower
from tests.emulator.ptxas_operands import module, target_of, verdicts

DATA = Path(__file__).parent / "data" / "ptxas_qualifiers.json"
_REGISTER = re.compile(r"%[a-z]+\d*(?:x2)?_(\d)")
_EXCHANGED = 12  # random variants of an instruction


@functools.cache
def instructions() -> tuple[str, ...]:
    """The instructions that `DATA` has variants of."""
    return tuple(json.loads(DATA.read_text())["verdicts"])


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


def refusal(instruction: str) -> str | None:
    """Why the emulator refuses an instruction before it runs; None: it does not."""
    try:
        lowering = lower(module([instruction], target_of(instruction)), "k", (32, 1, 1), check=False, registers=False)
        for block in lowering.flow.blocks:
            lowering.block(block)
    except UnsupportedPTX as error:
        return error.message
    return None


def differences(drawn: Sequence[str], said: str) -> Iterator[tuple[str, str | None]]:
    """(variant, why the emulator refuses it or None) for variants of which ptxas says something else."""
    for variant, verdict in zip(drawn, said, strict=True):
        reason = refusal(variant)
        if (reason is None) != (verdict == "1"):
            yield variant, reason


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.ptxas_qualifiers", description=__doc__.split("\n")[0])
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
        DATA.write_text(json.dumps({"ptxas": version, "seed": options.seed, "verdicts": recorded}, indent=0) + "\n")
    accepted = refused = 0
    for variant, reason in differences(list(asked), "".join(asked.values())):
        accepted, refused = accepted + (reason is None), refused + (reason is not None)
        print(f"accepted here, refused by ptxas: {variant}" if reason is None else f"refused here: {variant} | {reason}")
    print(f"seed {options.seed}: of {len(asked)} variants ptxas refuses {list(asked.values()).count('0')}")
    print(f"accepted here, refused by ptxas: {accepted}; refused here, accepted by ptxas: {refused}")


if __name__ == "__main__":
    main()
