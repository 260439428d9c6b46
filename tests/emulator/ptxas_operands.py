"""What ptxas accepts of instructions with other operands: ``python -m tests.emulator.ptxas_operands [--ptxas PATH]``.

`DATA` has an instruction of every kind that the emulator executes. Each of its operands is replaced by registers of
every type and by literals, left out and given twice, and ptxas says which of these variants are PTX. The verdicts lie
in the same file, so that `test_operands` needs no ptxas; run this module where there is one (CUDA 13.0 or later, or
triton's) after a new line is added there, with an empty string for its verdicts.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.emulator.isa.ptx.targets import SINCE

DATA = Path(__file__).parent / "data" / "ptxas_operands.json"
TYPES = (
    "pred", "b8", "u8", "s8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32", "f16x2", "b64", "u64", "s64",
    "f64", "b128",
)  # fmt: skip
LITERALS = ("1", "0f3F800000", "0d3FF0000000000000", "%tid.x", "variable")
_PLACE = re.compile(r"%\w+|\b\d+\b|\bp0\b|\btarget\b")
_GIVEN = ("1", "%b32_4", "%b64_4", "%pred_4", "[%b32_4]")
_ERROR = re.compile(r"line (\d+); (?:error|fatal)\s*:")


def split(operands: str) -> list[str]:
    """At the commas that are in no list and in no address."""
    found, depth = [""], 0
    for character in operands:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found if each.strip()]


def variants(form: str) -> list[str]:
    """The form itself and all that differ from it in one operand, always in the same order."""
    opcode, _, rest = form.partition(" ")
    operands = split(rest)
    found = [operands]
    for i, operand in enumerate(operands):
        places = list(_PLACE.finditer(operand))
        for place in dict.fromkeys([*places[:1], *places[-1:]]):
            for new in (*(f"%{type_}_5" for type_ in TYPES), *LITERALS):
                changed = operand[: place.start()] + new + operand[place.end() :]
                found.append([*operands[:i], changed, *operands[i + 1 :]])
        bare = operand[1:-1] if operand[0] in "[{" else operand
        for changed in (f"[{bare}]", f"{{{bare}}}", bare, f"{{{bare}, {bare}}}", f"{bare}|%pred_5"):
            found.append([*operands[:i], changed, *operands[i + 1 :]])
        found.append([*operands[:i], *operands[i + 1 :]])
    found.extend([*operands, given] for given in _GIVEN)
    return list(dict.fromkeys(f"{opcode} {', '.join(each)}".strip() for each in found))


def module(instructions: Sequence[str], target: str = "sm_100a", version: str = "9.0") -> str:
    """A kernel of these instructions; the first is in line `FIRST`."""
    types = [type_ for type_ in TYPES if type_ != "b128" or has_b128(target, version)]
    declared = " ".join(f".reg .{type_} %{type_}_<8>;" for type_ in types)
    head = f".version {version}\n.target {target}\n.address_size 64\n.shared .align 16 .b8 variable[1024];\n"
    body = "\n".join(f"{instruction};" for instruction in instructions)
    return f"{head}.visible .entry k(.param .u64 p0)\n{{\n{declared}\ntarget:\n{body}\nret;\n}}\n"


FIRST = 9


def has_b128(target: str, version: str) -> bool:
    """Whether a module may declare registers of .b128."""
    return number(version) >= (8, 3) and int(re.findall(r"\d+", target)[0]) >= 70


def number(version: str) -> tuple[int, ...]:
    """A version of PTX, to compare."""
    return tuple(map(int, version.split(".")))


def _refused(ptxas: str, target: str, instructions: Sequence[str], version: str) -> set[int]:
    """The numbers of those that ptxas refuses."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(module(instructions, target, version))
        file.flush()
        arch = "sm_75" if target in OLDER else target  # ptxas 13.0 reads older targets, and has no code for them
        command = [ptxas, "-arch", arch, file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True).stderr
    return {int(line) - FIRST for line in _ERROR.findall(text)}


_BATCH = 64  # instructions of a file


def verdicts(ptxas: str, target: str, instructions: Sequence[str], version: str = "9.0") -> str:
    """For each ``1`` where ptxas accepts it, else ``0``."""
    if len(instructions) > _BATCH:
        batches = (instructions[i : i + _BATCH] for i in range(0, len(instructions), _BATCH))
        return "".join(verdicts(ptxas, target, batch, version) for batch in batches)
    # The error at the end keeps ptxas from compiling, and shows that it has read everything.
    refused = _refused(ptxas, target, [*instructions, "add.u32 %b32_0"], version)
    if len(instructions) in refused:
        left = [each for i, each in enumerate(instructions) if i not in refused]
        if not left or len(left) == len(instructions):
            return "1" * len(left) or "0" * len(instructions)
        said = iter(verdicts(ptxas, target, left, version))  # it says some errors once in a file
        return "".join("0" if i in refused else next(said) for i in range(len(instructions)))
    if len(instructions) == 1:  # at this one it has stopped, or crashed
        return "0"
    half = len(instructions) // 2
    return "".join(verdicts(ptxas, target, part, version) for part in (instructions[:half], instructions[half:]))


#: Versions of PTX that brought anything that is executed here.
VERSIONS = (
    "4.0", "4.2", "4.3", "5.0", "6.0", "6.1", "6.2", "6.3", "6.5", "7.0", "7.1", "7.2", "7.4", "7.5", "7.6", "7.7",
    "7.8", "8.0", "8.1", "8.2", "8.3", "8.4", "8.5", "8.6", "8.7", "8.8", "9.0",
)  # fmt: skip


def since(ptxas: str, instructions: Sequence[str]) -> dict[str, str]:
    """``"sm_90 8.0"``: the first target that has each, and the first version of PTX that has it on that target."""
    found: dict[str, str] = {}
    left = list(instructions)
    for target in (*OLDER, *TARGETS):
        mine = [each for each, said in zip(left, verdicts(ptxas, target, left)) if said == "1"]
        left = [each for each in left if each not in set(mine)]
        for version in VERSIONS:
            if mine and number(version) >= number(SINCE[re.findall(r"\d+.?", target)[0]]):
                said = verdicts(ptxas, target, mine, version)
                found |= {each: f"{target} {version}" for each, is_one in zip(mine, said) if is_one == "1"}
                mine = [each for each in mine if each not in found]
    return found


#: Architectures that are asked which of the forms they have; older ones are asked for the first that has a form.
OLDER = ("sm_50", "sm_53", "sm_60", "sm_61", "sm_70", "sm_72", "sm_75")
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120", "sm_120a")


def target_of(form: str) -> str:
    """The architecture that has the instruction."""
    return "sm_90a" if form.startswith("wgmma") else "sm_100a"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.ptxas_operands", description=__doc__.split("\n")[0])
    parser.add_argument("--ptxas", default="ptxas", help="the program (default: %(default)s)")
    ptxas = parser.parse_args().ptxas
    recorded = {}
    for form in json.loads(DATA.read_text())["verdicts"]:
        recorded[form] = verdicts(ptxas, target_of(form), variants(form))
        if recorded[form][0] != "1":
            raise SystemExit(f"ptxas refuses `{form}` itself")
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    version = said.split("release ")[1].split(",")[0]
    targets = {target: verdicts(ptxas, target, list(recorded)) for target in TARGETS}
    DATA.write_text(json.dumps({"ptxas": version, "targets": targets, "verdicts": recorded}, indent=0) + "\n")
    print(f"{sum(map(len, recorded.values()))} variants of {len(recorded)} instructions")


if __name__ == "__main__":
    main()
