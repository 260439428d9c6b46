"""mma.sync and mma.sp with a kind: elements of four, six and eight bits, and scales of blocks of K (sm_120)."""

from dataclasses import dataclass, replace

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess
from cute_kernels.emulator.isa.instructions.sync import require_whole_warp
from cute_kernels.emulator.isa.ptx.families import as_integer
from cute_kernels.emulator.isa.ptx.program import Instruction, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder, Call
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.matrix.mma_sync import (
    accumulator_registers,
    accumulator_rows,
    operand_rows,
)
from cute_kernels.emulator.machine.units.matrix.operands import E2M1_PAIRS
from cute_kernels.emulator.machine.units.matrix.scaled_products import Numbers, Side, codes_of_rows, dot_products
from cute_kernels.emulator.machine.units.matrix.structured_sparsity import check_places, of_each_row, places
from cute_kernels.emulator.machine.units.sm import Warp

_ROWS, _COLUMNS = 16, 8
_PAIRS = ("mxf4", "mxf4nvf4")  # whose bytes are pairs of FP4
_THREADS = {"a": 2, "b": 4}  # which of a quad of lanes may hold scales: pairs of lanes, or lanes


@dataclass(frozen=True)
class Kind:
    """A form: types of A, B and of C and D; scales in a row of K, or 0, and their type; whether A is sparse."""

    name: str
    a_type: str
    b_type: str
    c_type: str
    scales: int = 0
    scale_type: str = ""
    sparse: bool = False


_ANY = "e4m3|e5m2|e2m3|e3m2|e2m1"


def _grammar(k: int) -> str:
    """Forms whose elements in bytes have this K."""
    return "; ".join((
        *(f"m16n8k{k} row col kind::f8f6f4 {c} {_ANY} {_ANY} {c}" for c in ("f32", "f16")),
        f"m16n8k{k} row col kind::mxf8f6f4 block_scale scale_vec::1X? f32 {_ANY} {_ANY} f32 ue8m0",
        f"m16n8k{2 * k} row col kind::mxf4 block_scale scale_vec::2X? f32 e2m1 e2m1 f32 ue8m0",
        f"m16n8k{2 * k} row col kind::mxf4nvf4 block_scale scale_vec::2X f32 e2m1 e2m1 f32 ue8m0",
        f"m16n8k{2 * k} row col kind::mxf4nvf4 block_scale scale_vec::4X f32 e2m1 e2m1 f32 ue4m3",
    ))  # fmt: skip


GRAMMAR, SPARSE_GRAMMAR = _grammar(32), _grammar(64)


def kind_of(parts: tuple[str, ...]) -> Kind | None:
    """The form of an opcode, or None: it has no kind."""
    name = next((part for part in parts if part.startswith("kind::")), "").removeprefix("kind::")
    if not name:
        return None
    form = Kind(name, *parts[-3:], sparse=parts[1] != "sync")
    if "block_scale" not in parts:
        return form
    scales = 1 if name == "mxf8f6f4" else 4 if parts[-1] == "ue4m3" else 2
    a_type, b_type, c_type, scale_type = parts[-4:]
    return replace(form, a_type=a_type, b_type=b_type, c_type=c_type, scales=scales, scale_type=scale_type)


def kind_operands(form: Kind) -> str:
    """Operands of a form."""
    count = 2 if form.c_type == "f16" else 4
    scales = ", {scale_a}1:b32, {ids_a}2:u16, {scale_b}1:b32, {ids_b}2:u16" if form.scales else ""
    b, metadata = (4, ", {e}1:b32, f:imm") if form.sparse else (2, "")
    return f"{{d}}{count}:b32, {{a}}4:b32, {{b}}{b}:b32, {{c}}{count}:b32{metadata}{scales}"


def lower_kind(block: BlockBuilder, instruction: Instruction, form: Kind) -> None:
    """mma.sync.kind::f8f6f4, with block scaling .kind::mxf8f6f4, .kind::mxf4 and .kind::mxf4nvf4; mma.sp of them."""
    d, *sources = map(items_of, instruction.operands[:4])
    registers = tuple(tuple(block.whole(block.value(item, 32)) for item in items) for items in sources)
    rest, metadata, scales = instruction.operands[4:], [], []
    if form.sparse:
        selector = as_integer(instruction, rest[1])
        if selector:
            raise instruction.refuse(f"sparsity selector {selector}; of this shape and type 0 are legal")
        metadata, rest = [block.whole(block.value(items_of(rest[0])[0], 32))], rest[2:]
    for words, which in zip(rest[::2], rest[1::2]):
        scales += [block.whole(block.value(items_of(words)[0], 32))]
        scales += [block.whole(block.value(item, 16)) for item in which.items]
    arguments = (form, *registers, tuple(metadata), tuple(scales))
    call = Call(mma_kind, arguments, effects=bool(metadata or scales))
    values = [value for each in (*registers, metadata, scales) for value in each]
    for item, value in zip(d, block.anchor(call, [("u32", False)] * len(d), values)):
        block.define(item, value)


def mma_kind(
    warp: Warp, mask: int, form: Kind, a: tuple[LaneValues, ...], b: tuple[LaneValues, ...],
    c: tuple[LaneValues, ...], metadata: tuple[LaneValues, ...], scales: tuple[LaneValues, ...],
) -> np.ndarray:  # fmt: skip
    """The registers of D, uint32 [registers, 32]. ``warp``, ``mask``: the lanes that execute it. ``form``: which.
    ``a``, ``b``, ``c``: registers. ``metadata``: of mma.sp a word, else nothing. ``scales``: of A and B the words, the
    byte and the thread, or nothing."""
    require_whole_warp(warp, mask, "mma.sp" if form.sparse else "mma.sync")
    a_words, b_words, c_words = (
        np.stack([np.broadcast_to(np.asarray(x, np.uint32), (1, 32)) for x in each], axis=1) for each in (a, b, c)
    )
    a_rows, b_rows = operand_rows(a_words, _ROWS)[0], operand_rows(b_words, _COLUMNS)[0]
    a_scales, b_scales = (_scales(form, "ab"[i], *scales[3 * i :][:3]) if scales else None for i in (0, 1))
    halves = form.c_type == "f16"
    old = accumulator_rows(c_words, _ROWS, np.uint16 if halves else np.uint32)[0].astype(np.uint32)
    if form.sparse:  # of each row of A all columns of B, with what its elements go with
        b_rows = _chosen(form, a_rows, b_rows, metadata[0])
        b_scales = None if b_scales is None else np.tile(b_scales, (_ROWS, 1))
        old = np.tile(old, _ROWS)
    sides = []
    for rows, found, type_ in ((a_rows, a_scales, form.a_type), (b_rows, b_scales, form.b_type)):
        elements = Numbers.of(_codes(rows, type_, form), type_)
        sides.append(Side(elements, None if found is None else Numbers.of(found, form.scale_type)))
    arithmetic = warp.cluster.arithmetic
    sums = arithmetic.scaled_sums(form.name) if scales else arithmetic.sums("mma", "e4m3", form.c_type)
    result = dot_products(*sides, old, form.c_type, sums).astype(np.uint16 if halves else np.uint32)
    if form.sparse:
        result = result.reshape(_ROWS, _ROWS, _COLUMNS)[np.arange(_ROWS), np.arange(_ROWS)]
    return accumulator_registers(result[None])[0]


def _chosen(form: Kind, a_rows: np.ndarray, b_rows: np.ndarray, metadata: LaneValues) -> np.ndarray:
    """uint8 [16 rows * 8 columns, bytes stored of a row]: what of B goes with each row of A."""
    words = np.broadcast_to(np.asarray(metadata, np.uint32), (1, 32))
    found = places(words, 0, a_rows.shape[1], 1)
    stored = a_rows if form.name in _PAIRS else _codes(a_rows, form.a_type, form)
    check_places(found, stored[None], ordered=True, tf32=False)
    return of_each_row(b_rows[None], found).reshape(_ROWS * _COLUMNS, -1)


def _codes(rows: np.ndarray, type_: str, form: Kind) -> np.ndarray:
    """uint8 [rows, bytes] -> codes: pairs of four bits, or in a byte four bits from bit 2 on, six from bit 0 on."""
    if form.name in _PAIRS:
        return codes_of_rows(rows, E2M1_PAIRS)
    return rows >> np.uint8(2) & np.uint8(15) if type_ == "e2m1" else rows & np.uint8(63 if type_[1] in "23" else 255)


def _scales(form: Kind, which: str, words: LaneValues, byte: LaneValues, thread: LaneValues) -> np.ndarray:
    """Codes [rows, scales]: rows r and r + 8 of A are in a pair of lanes of quad r, column r of B is in one of them."""
    first, chosen = (int(np.asarray(x).ravel()[0]) for x in (byte, thread))
    if chosen >= _THREADS[which] or first % form.scales or first + form.scales > 4:
        raise IllegalAccess(
            f"byte {first} and thread {chosen} of the scales of {which.upper()}; legal are multiples of {form.scales} "
            f"below 4, and threads below {_THREADS[which]}"
        )
    quads = np.broadcast_to(np.asarray(words, np.uint32), 32).reshape(8, 4)
    rows = quads[:, 2 * chosen : 2 * chosen + 2].T.reshape(-1) if which == "a" else quads[:, chosen]
    shifts = 8 * (first + np.arange(form.scales, dtype=np.uint32))
    return (rows[:, None] >> shifts.astype(np.uint32) & np.uint32(255)).astype(np.uint8)
