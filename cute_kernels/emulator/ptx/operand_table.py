"""The operands of every opcode that is executed, in the notation of `operand_syntax`, after the PTX ISA's syntax.

Keys are prefixes of opcodes, several in one string where they have the same operands; the longest that an opcode starts
with decides. A function gets the opcode's parts where its qualifiers decide which operands there are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from cute_kernels.emulator.ptx.families import FAMILIES, find_family, prefix_of
from cute_kernels.emulator.ptx.operand_syntax import HELD_IN, Slot, is_type, mismatch, read_forms
from cute_kernels.emulator.ptx.program import Instruction, Kernel, Register

Parts = tuple[str, ...]
_VECTOR = re.compile(r"v([248])")
_COMBINES = ("and", "or", "xor")


def _policy(parts: Parts) -> str:
    return ", policy:b64" if "L2::cache_hint" in parts else ""


def _data(name: str, type_: str, parts: Parts) -> str:
    """One register, which ptxas takes in braces too, or a list of them, whose width alone matters to ptxas."""
    lengths = [match[1] for part in parts if (match := _VECTOR.fullmatch(part))]
    return f"{{{name}}}{lengths[0]}:B{type_[1:]}" if lengths else f"{{{name}}}1:{type_}"


def _load(parts: Parts) -> str:
    """Not of 128 bits into a register in braces: ptxas 13.0 takes that, and makes a load of 64 bits of it."""
    data = _data("d", "T+", parts)
    return f"{'d' if data == '{d}1:T+' and 'b128' in parts else data}, [a]{_policy(parts)}"


def _store(parts: Parts) -> str:
    return f"[a], {_data('b', 'T+', parts)}{_policy(parts)}"


def _reduce(parts: Parts) -> str:
    second = ", c" if "cas" in parts else ""
    return f"[a], {_data('b', 'T', parts)}{second}{_policy(parts)}"


def _atom(parts: Parts) -> str:
    return f"{_data('d', 'T', parts)}, {_reduce(parts)}"


def _order(parts: Parts) -> str:
    return "d, a, b, c?" if parts[-1] == "f32" and "xorsign" not in parts else "d, a, b"


def _setp(parts: Parts) -> str:
    return "p|q?:pred, a, b" + (", c:pred" if set(_COMBINES) & set(parts) else "")


def _result_type(parts: Parts) -> str:
    """The type before the last one."""
    return parts[-2] if len(parts) > 2 and is_type(parts[-2]) else "b32"


def _set(parts: Parts) -> str:
    return f"d:{_result_type(parts)}, a, b" + (", c:pred" if set(_COMBINES) & set(parts) else "")


def _cvt(parts: Parts) -> str:
    types = [part for part in parts if is_type(part)]
    if any(part in HELD_IN or part in ("bf16", "bf16x2") for part in types):  # newer forms: no wider registers
        wider = ""
    else:
        wider = "+"
    random = ", rbits:b32" if "rs" in parts else ""
    if len(types) == 2 and types[0].endswith("x4"):
        return f"d:S, {{a}}4:T{random}"
    two = len(types) == 2 and types[0].endswith("x2") and types[1] == "f32"
    return f"d:S{wider}, a:T{wider}" + (f", b:T{wider}" if two else "") + random


def _vote(parts: Parts) -> str:
    return f"d:{'b32' if 'ballot' in parts else 'pred'}, a:pred, membermask:u32"


def _match(parts: Parts) -> str:
    return f"d{'|p?' if 'all' in parts else ''}:b32, a, membermask:u32"


def _mbarrier_wait(parts: Parts) -> str:
    state = "phaseParity:u32" if "parity" in parts else "state:b64"
    return f"waitComplete:pred, [addr], {state}, suspendTimeHint:u32?"


def _cp_async(parts: Parts) -> str:
    return f"[dst], [src], cpSize:imm{_policy(parts)}; [dst], [src], cpSize:imm, srcSize:u32/pred{_policy(parts)}"


def _bulk(parts: Parts) -> str:
    barrier = "" if "bulk_group" in parts else ", [mbar]"
    multicast = ", ctaMask:u16" if "multicast::cluster" in parts else ""
    mask = ", byteMask:u16" if "cp_mask" in parts else ""
    return f"[dst], [src], size:u32{barrier}{multicast}{_policy(parts)}{mask}"


def _offsets(parts: Parts) -> str:
    return ", {im2colOffsets}:u16" if "im2col" in parts else ""


def _bulk_tensor(parts: Parts) -> str:
    if "bulk_group" in parts:
        return f"[tensorMap{{coords}}], [src]{_policy(parts)}"
    multicast = ", ctaMask:u16" if "multicast::cluster" in parts else ""
    return f"[dst], [tensorMap{{coords}}], [mbar]{_offsets(parts)}{multicast}{_policy(parts)}"


def _tensor_prefetch(parts: Parts) -> str:
    return f"[tensorMap{{coords}}]{_offsets(parts)}{_policy(parts)}"


def _replace(parts: Parts) -> str:
    indexed = {"box_dim", "global_dim", "global_stride", "element_stride"} & set(parts)
    return "[addr], " + ("ord:imm, " if indexed else "") + "new_val"


def _tensor_fence(parts: Parts) -> str:
    return "[addr], size:imm" if "acquire" in parts else ""


def _query_cancel(parts: Parts) -> str:
    if "is_canceled" in parts:
        return "pred:pred, response:b128"
    return ("{xdim}4:b32" if "v4" in parts else "reg:b32") + ", response:b128"


def _commit(parts: Parts) -> str:
    return "[mbar]" + (", ctaMask:u16" if "multicast::cluster" in parts else "")


def _halves(parts: Parts) -> str:
    return ", immHalfSplitoff:imm" if "16x32bx2" in parts else ""


def _fragment(name: str, parts: Parts) -> str:
    """Registers of a matrix that a warp holds."""
    return f"{{{name}}}:{'b64' if 'f64' in parts else 'b32'}"


def _warp_mma(parts: Parts) -> str:
    """Operands of a warp's MMA; of the sparse forms the metadata and the selector follow."""
    sparse = ", {e}1:b32, f:imm" if parts[1:2] != ("sync",) and parts[0] == "mma" else ""
    return ", ".join(_fragment(name, parts) for name in "dabc") + sparse


def _matrix_store(parts: Parts) -> str:
    count = 2 if any(part.startswith("m8n8k") for part in parts) else 4 if parts[-1] == "f16" else 8
    return f"[p], {{r}}{count}:{'b64' if parts[-1] == 'f64' else 'b32'}, stride:u32?"


_MMA = "b_desc:b64, idesc:u32, {disable_output_lane}:b32, enable_input_d:pred, scale_input_d:imm?"
_TENSOR_MMA = "; ".join(
    f"[d_tmem], {a}, {rest}"
    for a in ("a_desc:b64", "[a_tmem]")
    for rest in (_MMA, _MMA.replace("{disable_output_lane}:b32, ", ""))
)


def _tensor_mma(parts: Parts) -> str:
    if "block_scale" not in parts:
        return _TENSOR_MMA
    rest = "b_desc:b64, idesc:u32, [scale_a], [scale_b], enable_input_d:pred"
    return f"[d_tmem], a_desc:b64, {rest}; [d_tmem], [a_tmem], {rest}"


# How many literals there are depends on types that have to go together; `instructions.wgmma.parse_form` looks at both.
_WGMMA = "; ".join(
    f"{{d}}:b32, {a}, b_desc:b64, scale_d:pred, imm_scale_a:imm?, imm_scale_b:imm?, imm_trans_a:imm?, imm_trans_b:imm?"
    for a in ("a_desc:b64", "{a}4:b32")
)

_GROUPS: dict[str, str | Callable[[Parts], str]] = {
    # arithmetic; the last operand of add.f32.f16 and fma.f32.f16 has the type of the result
    "abs neg not rcp sqrt rsqrt ex2 lg2 sin cos tanh brev cvta": "d, a",
    "add sub": "d:S, a:T, b:S",
    "mul div rem and or xor copysign": "d, a, b",
    "min max": _order,
    "fma": "d:S, a:T, b:T, c:S",
    "mad sad": "d, a, b, c",
    "add.cc sub.cc": "d, carry_out:pred, a, b",
    "addc subc": "d, a, b, carry_in:pred",
    "addc.cc subc.cc": "d, carry_out:pred, a, b, carry_in:pred",
    "mad.lo.cc mad.hi.cc": "d, carry_out:pred, a, b, c",
    "madc": "d, a, b, c, carry_in:pred",
    "madc.lo.cc madc.hi.cc": "d, carry_out:pred, a, b, c, carry_in:pred",
    "mul.wide": "d:2T, a, b",
    "mad.wide": "d:2T, a, b, c:2T",
    "shl shr": "d, a, b:u32",
    "shf": "d, a, b, c:u32",
    "bfe": "d, a, b:u32, c:u32",
    "bfi": "f, a, b, c:u32, d:u32",
    "popc clz bfind": "d:u32, a",
    "prmt": "d, a, b, c",
    "fns": "d, mask, base, offset",
    "bmsk": "d, position, width",
    "lop3": "d, a, b, c, immLut:imm",
    "dp4a dp2a": "d:u32, a:u32, b:u32, c:u32",
    "setp": _setp,
    "set": _set,
    "slct": lambda parts: "d:R, a:R, b:R, c".replace("R", _result_type(parts)),
    "cnot": "d, a",
    "testp": "p:pred, a",
    "mul24": "d, a, b",
    "mad24": "d, a, b, c",
    "szext": "d, a, b:u32",
    "isspacep": "p:pred, a:u32/u64",
    "selp": "d, a, b, p:pred",
    "cvt": _cvt,
    "cvt.pack": "d, a:s32, b:s32, c:b32?",
    **{f"v{name}{n}": "d.:u32, a.:u32, b.:u32, c:u32?" for n in ("", "2", "4")
       for name in ("add", "sub", "absdiff", "min", "max", "set", "avrg", "shl", "shr")},
    "vmad": "d:u32, -a.:u32, -b.:u32, -c:u32",
    "pmevent pmevent.mask": "a:imm",
    "brkpt": "",
    # moves, exchange between lanes
    "mov": "d~, a~",
    "mapa": "d, a, b:u32",
    "getctarank": "d:u32, a",
    "elect.sync": "d|p:u32, membermask:u32",
    "shfl.sync": "d|p?, a, b, c, membermask:u32",
    "vote.sync": _vote,
    "match": _match,
    "redux.sync": "dst, src, membermask:u32",
    "activemask": "d",
    # memory
    "ld ldu": _load,
    "st": _store,
    "st.bulk": "[a], size:b64, initval:imm",
    "atom": _atom,
    "red": _reduce,
    "st.async red.async": lambda parts: f"[a], {_data('b', 'T', parts)}, [mbar]",
    "multimem.ld_reduce": lambda parts: f"{_data('d', 'T', parts)}, [a]",
    "multimem.st multimem.red": _reduce,
    "prefetch prefetchu": "[a]",
    "discard applypriority": "[a], size:imm",
    "createpolicy": "policy, fraction:f32?",
    "createpolicy.range": "policy, [a], primary_size:u32, total_size:u32",
    "createpolicy.cvt": "policy, access_property",
    "ldmatrix": "{r}:b32, [p]",
    "stmatrix": "[p], {r}:b32",
    "movmatrix": "d:b32, a:b32",
    # asynchronous copies
    "cp.async": _cp_async,
    "cp.async.commit_group cp.async.wait_all cp.async.bulk.commit_group": "",
    "cp.async.wait_group cp.async.bulk.wait_group": "N:imm",
    "cp.async.mbarrier.arrive": "[addr]",
    "cp.async.bulk cp.reduce.async.bulk": _bulk,
    "cp.async.bulk.prefetch": lambda parts: f"[src], size:u32{_policy(parts)}",
    "cp.async.bulk.tensor cp.reduce.async.bulk.tensor": _bulk_tensor,
    "cp.async.bulk.prefetch.tensor": _tensor_prefetch,
    "tensormap.replace": _replace,
    "tensormap.cp_fenceproxy": "[dst], [src], size:imm",
    # synchronisation
    "bar.sync bar.cta.sync barrier.sync barrier.cta.sync": "a:u32, b:u32?",
    "bar.arrive bar.cta.arrive barrier.arrive barrier.cta.arrive": "a:u32, b:u32",
    "bar.red bar.cta.red barrier.red barrier.cta.red": "d, a:u32, c:pred; d, a:u32, b:u32, c:pred",
    "bar.warp.sync": "membermask:u32",
    "barrier.cluster fence membar griddepcontrol trap": "",
    "fence.proxy.tensormap::generic": _tensor_fence,
    "mbarrier.init": "[addr], count:u32",
    "mbarrier.inval": "[addr]",
    "mbarrier.expect_tx mbarrier.complete_tx": "[addr], txCount:u32",
    "mbarrier.arrive mbarrier.arrive_drop": "state:b64, [addr], count:u32?",
    "mbarrier.arrive.expect_tx mbarrier.arrive_drop.expect_tx": "state:b64, [addr], txCount:u32",
    "mbarrier.pending_count": "count:u32, state:b64",
    "mbarrier.try_wait mbarrier.test_wait": _mbarrier_wait,
    "nanosleep": "t:u32",
    "setmaxnreg": "imm_reg_count:imm",
    "clusterlaunchcontrol.try_cancel": "[addr], [mbar]",
    "clusterlaunchcontrol.query_cancel": _query_cancel,
    # tensor cores
    "mma wmma.mma": _warp_mma,
    "wmma.load": lambda parts: f"{_fragment('r', parts)}, [p], stride:u32?",
    "wmma.store": _matrix_store,
    "wgmma.mma_async": _WGMMA,
    "wgmma.fence wgmma.commit_group": "",
    "wgmma.wait_group": "N:imm",
    "tcgen05.alloc": "[dst], nCols:u32",
    "tcgen05.dealloc": "taddr:u32, nCols:u32",
    "tcgen05.relinquish_alloc_permit tcgen05.wait::ld tcgen05.wait::st": "",
    "tcgen05.fence::before_thread_sync tcgen05.fence::after_thread_sync": "",
    "tcgen05.ld": lambda parts: "{r}:b32, [taddr]" + _halves(parts),
    "tcgen05.st": lambda parts: "[taddr]" + _halves(parts) + ", {r}:b32",
    "tcgen05.mma": _tensor_mma,
    "tcgen05.cp": "[taddr], s_desc:b64",
    "tcgen05.shift": "[taddr]",
    "tcgen05.commit": _commit,
    # control flow
    "bra": "tgt:label",
    "ret exit": "",
}
SYNTAX = {tuple(key.split(".")): syntax for keys, syntax in _GROUPS.items() for key in keys.split()}
#: Families whose operands their own functions check: those of a call are those of the function called.
UNCHECKED = {("call",)}


@functools.cache
def forms_of(parts: Parts) -> dict[int, list[tuple[Slot, ...]]] | None:
    """Operands that an opcode takes, by their number; None: its operands are not in the table."""
    for length in range(len(parts), 0, -1):
        syntax = SYNTAX.get(parts[:length])
        if syntax is not None:
            found = prefix_of(parts)
            count = FAMILIES[found].destinations if found is not None else 0
            return read_forms(syntax if isinstance(syntax, str) else syntax(parts), parts, count)
    return None


@functools.cache
def _plain(parts: Parts, count: int) -> tuple[frozenset[str], ...] | None:
    """Per operand the declared types of a register that is all of it: most instructions have nothing else."""
    forms = (forms_of(parts) or {}).get(count, [])
    return tuple(slot.simple for slot in forms[0]) if len(forms) == 1 else None


def check_operands(kernel: Kernel) -> None:
    """Refuses instructions whose operands are too few, too many, of another kind or of another width than they take.

    Raises:
        UnsupportedPTX: it names the instruction, the operand, what is given and what is allowed.
    """
    registers = kernel.registers
    for instruction in kernel.instructions:
        operands = instruction.operands
        plain = _plain(instruction.parts, len(operands))
        if plain is not None:
            for allowed, operand in zip(plain, operands):
                if type(operand) is not Register or registers[operand.name] not in allowed:
                    break
            else:
                continue
        _check(instruction, registers)


def _check(instruction: Instruction, registers: dict[str, str]) -> None:
    forms = forms_of(instruction.parts)
    if forms is None:
        find_family(instruction)  # refuses opcodes that are not implemented
        return
    reason = mismatch(instruction, forms, registers)
    if reason is not None:
        raise instruction.refuse(reason)
