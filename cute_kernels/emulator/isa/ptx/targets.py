"""Which architectures have an instruction (PTX ISA, "Target ISA Notes", and what ptxas 13.0 does)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.lexer import Reader
from cute_kernels.emulator.isa.ptx.program import Instruction

#: Targets and the version of PTX that has them first (PTX ISA, ".target", and ptxas 13.0).
_SINCE = dict(pair.split(":") for pair in (
    "50:4.0 52:4.1 53:4.2 60:5.0 61:5.0 62:5.0 70:6.0 72:6.1 75:6.3 80:7.0 86:7.1 87:7.4 88:7.4 89:7.8 90:7.8 90a:8.0 "
    "100:8.6 100a:8.6 100f:8.8 101:8.6 101a:8.6 101f:8.8 103:8.8 103a:8.8 103f:8.8 110:9.0 110a:9.0 110f:9.0 120:8.7 "
    "120a:8.7 120f:8.8 121:8.8 121a:8.8 121f:8.8"
).split())  # fmt: skip
#: Versions of PTX: the last minor number of each major one. Who knows how many the newest has?
_VERSIONS = {1: 5, 2: 3, 3: 2, 4: 3, 5: 0, 6: 5, 7: 8, 8: 8, 9: 99}
_OPTIONS = ("texmode_unified", "texmode_independent", "debug")

#: Opcodes that not every architecture since sm_80 has: the first that does, with "a" only those whose names end in "a"
#: or "f", and the last, if others follow. The first row that an opcode matches decides.
_FIRST = {
    r"cp\.async\.bulk\.tensor.*\bcta_group": "100a 119",
    r"wgmma": "90a 90",
    r"mma\.sync.*\bkind::": "120a",
    r"cp\..*(scatter4|\.L2\..*gather4|gather4.*(multicast|cta_group))": "100a 119",
    r"cp\..*tile::gather4": "100",
    r"setmaxnreg|tensormap\.replace": "90a",
    r"tcgen05|redux\.sync\.(min|max)\..*f32": "100a 119",
    r"cvt\..*\brs\b": "100a 119",
    r"cvt\..*\br[nz]\b.*satfinite\..*tf32|(ld|st)\..*\.(v8\.\w32|v4\.\w64)$": "100",
    r"cvt\..*\b(e2m1x2|e2m3x2|e3m2x2|ue8m0x2)|multimem\..*\be\dm\d": "100a",
    r"(ld|st)matrix\..*\b(m16n16|m8n16|m16n8)\b": "100a",
    r"st\.bulk|clusterlaunchcontrol|.*\bf32x2\b|(add|sub|fma)\..*f32\.b?f16": "100",
    r"barrier\.cluster|c(p|p\.reduce)\.async\.bulk|elect|fence\.proxy\.(async|tensormap)|getctarank|griddepcontrol":
        "90",
    r"mapa|mbarrier\.(expect_tx|complete_tx|try_wait|arrive.*\.expect_tx)|multimem|prefetch\.tensormap|tensormap": "90",
    r"(st|red)\.async|stmatrix|(add|sub|mul|setp?)\.(\w+\.)*bf16|(min|max)\.relu\.s": "90",
    r"cvt\..*\br[nz]\b.*tf32|cvt\.(\w+\.)*(bf16\.(?!f32)\w+|(?!f32\.)\w+\.bf16|ftz\.f32\.bf16)$": "90",
    r"(ex2|tanh)\..*bf16|fence\..*sync_restrict": "90",
    r"(atom|red)\..*(\.b128|\.v\d\.|add\.noftz\.bf16)": "90",
    r"cvt\..*\b(e4m3x2|e5m2x2)|mma\.(sync|sp)\..*\be[45]m[23]\b": "89",
    r".*\bcluster\b|fence\.mbarrier_init|(ex2|tanh)\..*bf16|(add|min|max)\.[us]16x2": "90",
    r"(min|max)\..*xorsign": "86",
}  # fmt: skip
_ROWS = [(re.compile(pattern), needed) for pattern, needed in _FIRST.items()]
_TARGET = re.compile(r"sm_(\d+)([af]?)")


@functools.cache
def missing(target: str, opcode: str) -> str:
    """Why an architecture, ``"sm_90a"``, does not have an opcode, or ""; those of another kind have all."""
    found = _TARGET.fullmatch(target)
    first, *last = next((which for pattern, which in _ROWS if pattern.match(opcode)), "0").split()
    own = first.endswith("a")
    if found is None:
        return ""
    if last and int(found[1]) > int(last[0]):
        return f"{target} does not have it: only the generation of sm_{first} does"
    if int(found[1]) >= int(first.rstrip("a")) and (found[2] or not own):
        return ""
    return f"{target} does not have it: it needs sm_{first} or a later architecture"


def check_target(target: str, instructions: Iterable[Instruction]) -> None:
    """Refuses instructions that an architecture does not have.

    Args:
        target: of the module.
        instructions: of a kernel.

    Raises:
        UnsupportedPTX: it names the instruction, and where it exists.
    """
    for instruction in instructions:
        reason = missing(target, instruction.opcode)
        if reason:
            raise instruction.refuse(reason)


def read_head(reader: Reader) -> tuple[str, str]:
    """Version and target of a module, whose directives stand first, in this order, and behind them the address size.

    Raises:
        UnsupportedPTX: one of them is missing, there is no such version, or it does not have the target; addresses of
            32 bits.
    """
    reader.take(".version")
    token = reader.take()
    major, _, minor = token.text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and int(minor) <= _VERSIONS.get(int(major), -1)):
        raise UnsupportedPTX(f".version {token.text}: there is no such version of PTX", ptx_line=token.line)
    version = token.text
    reader.take(".target")
    token = reader.take()
    targets = [token.text]
    while reader.peek() == ",":
        reader.take()
        targets.append(reader.take().text)
    names = [re.sub(r"^(sm|compute)_", "", each) for each in targets]
    for name, given in zip(names, targets):
        if name not in _SINCE and (name not in _OPTIONS or given == targets[0]):
            raise UnsupportedPTX(f".target {given}: there is no such target", ptx_line=token.line)
        if name in _SINCE and (int(major), int(minor)) < tuple(map(int, _SINCE[name].split("."))):
            message = f".target {given}: it needs .version {_SINCE[name]} or later, not {version}"
            raise UnsupportedPTX(message, ptx_line=token.line)
    if set(_OPTIONS[:2]) <= set(names):
        raise UnsupportedPTX(f".target {', '.join(targets)}: one texture mode at most", ptx_line=token.line)
    if reader.peek() == ".address_size":
        reader.take()
        size = reader.take()
        if size.text != "64":
            raise UnsupportedPTX(f".address_size {size.text}: must be 64", ptx_line=size.line)
    return version, f"sm_{names[0]}"
