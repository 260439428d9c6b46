"""Which architectures have an instruction (PTX ISA, "Target ISA Notes", and what ptxas 13.0 does)."""

import functools
import re
from collections.abc import Iterable

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.lexer import Reader
from cute_kernels.emulator.isa.ptx.program import Instruction, Special

#: Targets and the version of PTX that has them first (PTX ISA, ".target", and ptxas 13.0).
SINCE = dict(pair.split(":") for pair in (
    "50:4.0 52:4.1 53:4.2 60:5.0 61:5.0 62:5.0 70:6.0 72:6.1 75:6.3 80:7.0 86:7.1 87:7.4 88:7.4 89:7.8 90:7.8 90a:8.0 "
    "100:8.6 100a:8.6 100f:8.8 101:8.6 101a:8.6 101f:8.8 103:8.8 103a:8.8 103f:8.8 110:9.0 110a:9.0 110f:9.0 120:8.7 "
    "120a:8.7 120f:8.8 121:8.8 121a:8.8 121f:8.8"
).split())  # fmt: skip
#: Versions of PTX: the last minor number of each major one. Who knows how many the newest has?
_VERSIONS = {1: 5, 2: 3, 3: 2, 4: 3, 5: 0, 6: 5, 7: 8, 8: 8, 9: 99}
_OPTIONS = ("texmode_unified", "texmode_independent", "debug")

#: Opcodes, with the number of their operands, that not every architecture has: the first that does, with "a" only those
#: whose names end in "a" or "f", and the last, if others follow. The first row that fits decides.
_FIRST = {
    r"cp\..*(\bcta_group|im2col::w)": "100a 119",
    r"wgmma": "90a 90",
    r"mma\..*kind::f8f6f4.*(\.e[45]m[23]){2}\b": "100a",
    r"mma\..*\bkind::": "120a",
    r"cp\..*(scatter4|\.(L2|shared::cluster)\..*gather4|gather4.*(multicast|cta_group))": "100a 119",
    r"cp\..*tile::gather4": "100",
    r"setmaxnreg|tensormap\.replace": "90a",
    r"tcgen05|redux\.sync\.(min|max)\..*f32": "100a 119",
    r"cvt\..*\brs\b": "100a 119",
    r"cvt\..*\br[nz]\b.*satfinite\..*tf32|(ld|st)\..*\.(v8\.\w32|v4\.\w64) |(max|min)\.(\w+\.)*f32 4": "100",
    r"cvt\..*\b(e2m1x2|e2m3x2|e3m2x2|ue8m0x2)|multimem\..*\be\dm\d": "100a",
    r"(ld|st)matrix\..*\b(m16n16|m8n16|m16n8)\b": "100a",
    r"clusterlaunchcontrol.*multicast": "100a",
    r"st\.bulk|cp\..*cp_mask|clusterlaunchcontrol|.*\bf32x2\b|(add|sub|fma)\..*f32\.b?f16": "100",
    r"barrier\.cluster|c(p|p\.reduce)\.async\.bulk|elect|fence\.proxy\.(async|tensormap)|getctarank|griddepcontrol":
        "90",
    r"mapa|mbarrier\.(expect_tx|complete_tx|try_wait|arrive.*\.expect_tx)|multimem|prefetch\.tensormap|tensormap": "90",
    r"(st|red)\.async|stmatrix|(add|sub|mul|setp?)\.(\w+\.)*bf16|(min|max)\.relu\.s": "90",
    r"%(is_explicit_)?n?cluster|%aggr": "90",
    r"cvt\..*\br[nz]\b.*tf32|cvt\.(\w+\.)*(bf16\.(?!f32)\w+|(?!f32\.)\w+\.bf16|ftz\.f32\.bf16) ": "90",
    r"(ex2|tanh)\..*bf16|fence\..*sync_restrict": "90",
    r"(atom|red)\..*(\.b128|\.v\d\.|add\.noftz\.bf16)": "90",
    r"cvt\..*\b(e4m3x2|e5m2x2)|mma\.(sync|sp)\..*\be[45]m[23]\b": "89",
    r".*\bcluster\b|fence\.mbarrier_init|(ex2|tanh)\..*bf16|(add|min|max)\.[us]16x2": "90",
    r"mbarrier\.arrive\.(?!noComplete).* 3|mma\.\S*(m16n8k16|m16n8k8|m16n8k4)\..*f64": "90",
    r"(min|max)\..*xorsign": "86",
    r"cp\.async|mbarrier|redux|createpolicy|discard|applypriority|prefetch.*evict|%reserved": "80",
    r".*\b(L2::(cache_hint|256B)|m8n8k4|tf32|bf16(x2)?)\b": "80",
    r"mma\.(sp|.*m16n8k(16|32|64|128|256|4)\b)|(min|max)\..*(NaN|f16)|(fma|cvt)\..*relu|cvt\.(\w+\.)*f16x2": "80",
    r"mma|(ld|mov)matrix|tanh|ex2\..*f16|.*\.L2::\d+B|wmma\..*\b(b1|[su]4)\b": "75",
    r"wmma\..*\b[us](8|32)\b|cvt\.pack": "72",
    r"wmma|lop3\.(and|or)|match|nanosleep|bmsk|szext|isspacep\.param|cvta\.param|.*\b(b128|L1::\w+|weak|relaxed|acquire|release)\b":
        "70",
    r"fence|(atom|red)\..*(noftz\.f16|cas\.b16) |.*acq_rel|cvt\..*satfinite\.f16\b": "70",
    r"dp[24]a": "61",
    r"(atom|red)\.(.*\.)?(cta|gpu|sys|f64|f16x2)\b": "60",
    r"alloca|stack|(add|sub|mul|fma|neg|abs|setp?)\..*\bf16(x2)?\b": "53",
}  # fmt: skip
#: Likewise, the version of PTX that has them first, where it is newer than the first architecture.
_FIRST_VERSION = {
    r"(max|min)\.(\w+\.)*f32 4|(ld|st)\..*\.(v8\.\w32|v4\.\w64) |tcgen05\.mma\..*(block16|block32)": "8.8",
    r"tcgen05\.mma\..*block_scale(?!\.scale_vec)|tcgen05\.\w+\.red": "8.8",
    r"mma\.sync\..*(f16\.e\dm\d\.e\dm\d\.f16|m16n8k16\..*\.e\dm\d)|cvt\..*\brs\b|tcgen05\.mma\..*mxf4nvf4": "8.7",
    r"mma\.\S*kind::(?!f8f6f4.*(\.e[45]m[23]){2})": "8.7",
    r"cp\.async\.bulk\.(tensor\.\dd\.)?shared::cta|.*(gather4|scatter4|im2col::w)": "8.6",
    r"mbarrier\.(arrive|t\w+_wait).*relaxed|(ld|st)matrix\..*\b(m16n16|m8n16|m16n8)\b|fence\..*sync_restrict": "8.6",
    r"mma\..*ordered_metadata": "8.5",
    r"mma\.\S*\.e\dm\d\.e\dm\d\b|wgmma\..*\.(s8\.u8|u8\.s8)\b": "8.4",
    r".*\.b128\b|.*tensormap::generic|tensormap\.replace|.*param::entry": "8.3",
    r"multimem\.ld_reduce.*acc::f32|.*\bmmio\b|lop3\.(and|or)": "8.2",
    r"%aggr|multimem|(st|red)\.async|(atom|red)\..*\.v\d\b|cvt\..*(e4m3x2|e5m2x2|satfinite\.(b?f16|tf32))": "8.1",
    r"c(p|p\.reduce)\.async\.bulk|elect|fence\.(proxy\.async|mbarrier_init)|prefetch\.tensormap|%current_graph": "8.0",
    r"mbarrier\.\S*(_tx|\.cta|cluster)\b|barrier\.cluster.*(relaxed|release|acquire)": "8.0",
    r"(add|min|max)\.\S*[us]16x2|(min|max)\.relu\.s": "8.0",
    r"bar(rier)?\.cta|(?!cp\.async\.c).*::(cta|cluster)\b|movmatrix|.*\bcluster\b": "7.8",
    r"(isspacep|cvta\S*)\.param": "7.7",
    r"bmsk|szext|%reserved": "7.6",
    r"fence\.proxy": "7.5",
    r"createpolicy|discard|applypriority|alloca|stack|.*\.(L1::|L2::)": "7.4",
    r".*xorsign": "7.2",
    r"mma\.(sp|\S*and\.popc)|cvt\.(\w+\.)*f32\.bf16|mbarrier\.test_wait\.parity": "7.1",
    r"ex2\..*f16|tanh": "7.0",
    r"mma|ldmatrix|abs\..*f16|set\.(\w+\.)*[us]\d\d\.f16|cvt\.pack": "6.5",
    r"wmma|(atom|red)\..*(noftz\.f16|b16) ": "6.3",
    r"activemask|nanosleep|(atom|red)\..*noftz\.f16x2": "6.2",
    r"bar\.warp|barrier|fns|neg\.(ftz\.)?f16|(shfl|vote)\S*\.sync": "6.0",
    r"lop3|(add|sub)c?\.cc\.[us]64|madc?\..*\.cc\..64": "4.3",
}  # fmt: skip
_ROWS, _VERSION_ROWS = (
    [(re.compile(pattern), needed) for pattern, needed in table.items()] for table in (_FIRST, _FIRST_VERSION)
)
_TARGET = re.compile(r"sm_(\d+)([af]?)")


@functools.cache
def first(opcode: str, operands: int) -> tuple[str, str, str]:
    """First architecture ("80", "90a") that has an opcode, the last if others follow, and the first version of PTX."""
    text = f"{opcode} {operands}"
    target, _, last = next((which for pattern, which in _ROWS if pattern.match(text)), "0").partition(" ")
    return target, last, next((which for pattern, which in _VERSION_ROWS if pattern.match(text)), "0.0")


def missing(target: str, opcode: str, operands: int = 0) -> str:
    """Why an architecture, ``"sm_90a"``, does not have an opcode, or ""; those of another kind have all."""
    found = _TARGET.fullmatch(target)
    if found is None:
        return ""
    needed, last, _ = first(opcode, operands)
    own = needed.endswith("a")
    if last and int(found[1]) > int(last):
        return f"{target} does not have it: only the generation of sm_{needed} does"
    if int(found[1]) >= int(needed.rstrip("a")) and (found[2] or not own):
        return ""
    return f"{target} does not have it: it needs sm_{needed} or a later architecture"


@functools.cache
def refusal(target: str, version: str, name: str, operands: int = 0) -> str:
    """Why an architecture, or a version of PTX (``"8.7"``), does not have an opcode or a special register, or ""."""
    needed, which = first(name, operands)[2], f"{name}: " if name.startswith("%") else ""
    if _number(needed) > _number(version):
        return f"{which}.version {version} does not have it: it needs .version {needed} or later"
    reason = missing(target, name, operands)
    return reason and which + reason


def check_target(target: str, version: str, instructions: Iterable[Instruction]) -> None:
    """Refuses instructions and special registers that an architecture, or a version of PTX, does not have. ``target``:
    of the module. ``version``: of the module, ``"8.7"``. ``instructions``: of a kernel. Raises UnsupportedPTX: it names
    the instruction, and where it exists."""
    for instruction in instructions:
        reason = refusal(target, version, instruction.opcode, len(instruction.operands))
        for operand in instruction.operands:
            if not reason and type(operand) is Special:
                reason = refusal(target, version, operand.name)
        if reason:
            raise instruction.refuse(reason)


@functools.cache
def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def read_head(reader: Reader) -> tuple[str, str]:
    """Version and target of a module, whose directives stand first, in this order, and behind them the address size.
    Raises UnsupportedPTX: one of them is missing, there is no such version, or it does not have the target; addresses
    of 32 bits."""
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
        if name not in SINCE and (name not in _OPTIONS or given == targets[0]):
            raise UnsupportedPTX(f".target {given}: there is no such target", ptx_line=token.line)
        if name in SINCE and _number(version) < _number(SINCE[name]):
            message = f".target {given}: it needs .version {SINCE[name]} or later, not {version}"
            raise UnsupportedPTX(message, ptx_line=token.line)
    if set(_OPTIONS[:2]) <= set(names):
        raise UnsupportedPTX(f".target {', '.join(targets)}: one texture mode at most", ptx_line=token.line)
    if reader.peek() == ".address_size":
        reader.take()
        size = reader.take()
        if size.text != "64":
            raise UnsupportedPTX(f".address_size {size.text}: must be 64", ptx_line=size.line)
    return version, f"sm_{names[0]}"
