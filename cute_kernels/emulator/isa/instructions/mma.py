"""Warp-level matrix multiplication: mma.sync, and mma.sp with a sparse A."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cute_kernels.emulator.isa.instructions.mma_kinds import GRAMMAR, SPARSE_GRAMMAR, kind_of, kind_operands, lower_kind
from cute_kernels.emulator.isa.instructions.sync import require_whole_warp
from cute_kernels.emulator.isa.ptx.families import always_varies, as_integer
from cute_kernels.emulator.isa.ptx.program import Instruction, items_of
from cute_kernels.emulator.machine.graph.block import BlockBuilder, Call
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.graph.values import Value
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.matrix.mma_sync import SHAPES, SPARSE_SHAPES, TYPES, Form, Sparsity, multiply
from cute_kernels.emulator.machine.units.matrix.structured_sparsity import threads_with_metadata
from cute_kernels.emulator.machine.units.sm import Warp


def form_of(parts: tuple[str, ...]) -> Form:
    """The form of ``mma{.sp}.sync.aligned.<shape>.row.col{.qualifiers}.<D>.<A>.<B>.<C>``, without a sparsity."""
    shape, _, _, *extra, _, a_type, b_type, c_type = parts[3 if parts[1] == "sync" else 4 :]
    m, n, k = map(int, re.findall(r"\d+", shape))
    variant = extra[0] if extra else "rn" if a_type == "f64" else ""
    return Form(m, n, k, TYPES[a_type], TYPES[b_type], c_type, variant == "satfinite", variant)


def _with_selector(instruction: Instruction, dense: Form) -> Form:
    selector = as_integer(instruction, instruction.operands[5])
    form = replace(dense, sparsity=Sparsity(selector, instruction.parts[1] == "sp::ordered_metadata"))
    groups = 4 // threads_with_metadata(form.stored_bytes, 2 if form.a_type.nbytes > 1 else 1)
    if not 0 <= selector < groups:
        legal = "0" if groups == 1 else f"0 to {groups - 1}"
        raise instruction.refuse(f"sparsity selector {selector}; of this shape and type {legal} are legal")
    return form


def mma_sync(
    warp: Warp, mask: int, form: Form, a: tuple[LaneValues, ...], b: tuple[LaneValues, ...],
    c: tuple[LaneValues, ...], metadata: LaneValues | None,
) -> np.ndarray:  # fmt: skip
    """mma.sp, and mma.sync of types that the core does not multiply: [registers, 32].

    Operands are one array [32] per register, or an int where it is uniform; ``metadata``: of mma.sp, else None.
    """
    require_whole_warp(warp, mask, "mma.sync" if form.sparsity is None else "mma.sp")
    if metadata is not None:
        metadata = np.broadcast_to(np.asarray(metadata, np.uint32), (1, 32))
    dtype = np.uint64 if form.register_bits == 64 else np.uint32
    words = ([np.asarray(x, dtype) for x in operand] for operand in (a, b, c))
    stacked = (np.stack([np.broadcast_to(x, (1, 32)) for x in operand], axis=1) for operand in words)
    return multiply(form, *stacked, warp.cluster.arithmetic, metadata).reshape(-1, 32)


#: Types of A and B that go together, those of C and D, and what else the opcode says.
_KINDS = (
    ("f16", "f16|f32", ""), ("bf16", "f32", ""), ("tf32", "f32", ""), ("f64", "f64", "$round?"),
    ("e4m3|e5m2", "f16|f32", ""), ("s8|u8", "s32", "satfinite?"), ("s4|u4", "s32", "satfinite?"),
    ("b1", "s32", "xor|and popc"),
)  # fmt: skip


def _grammar(shapes: Mapping[tuple[int, int, int], Sequence[str]]) -> str:
    """Forms of the shapes with types of A; C and D have one type."""
    forms = []
    for types, sums, extra in _KINDS:
        first = types.partition("|")[0]
        for each in sums.split("|"):
            for shape in (f"m{m}n{n}k{k}" for (m, n, k), legal in shapes.items() if first in legal):
                forms.append(f"{shape} row col {extra} {each} {types} {types} {each}")
    return "; ".join(forms)


def _operands(parts: tuple[str, ...]) -> str:
    """The metadata and the selector follow in the sparse forms."""
    kind = kind_of(parts)
    if kind is not None:
        return kind_operands(kind)
    form, sparse = form_of(parts), parts[1] != "sync"
    if sparse:
        form = replace(form, sparsity=Sparsity(0, ordered=False))
    counts = form.c_registers, form.a_registers, form.b_registers, form.c_registers
    lists = [f"{{{name}}}{count}:b{form.register_bits}" for name, count in zip("dabc", counts)]
    return ", ".join(lists) + ", {e}1:b32, f:imm" * sparse


@family("mma.sp.sync.aligned", varies=always_varies, operands=_operands, qualifiers=_grammar(SPARSE_SHAPES))
@family(
    "mma.sp::ordered_metadata.sync.aligned", varies=always_varies, operands=_operands,
    qualifiers=f"{_grammar(SPARSE_SHAPES)}; {SPARSE_GRAMMAR}",
)  # fmt: skip
@family(
    "mma.sync.aligned", varies=always_varies, operands=_operands, qualifiers=f"{_grammar(SHAPES)}; {GRAMMAR}",
)  # fmt: skip
def _mma(block: BlockBuilder, instruction: Instruction) -> None:
    """mma.sync: f16, bf16, tf32, e4m3, e5m2 into f32 (f16: of f16 and FP8), s8, u8, s4, u4 and b1 into s32, f64; mma.sp
    of all but the latter two. On sm_120 FP6, FP4, block scaling.
    """
    kind = kind_of(instruction.parts)
    if kind is not None:
        lower_kind(block, instruction, kind)
        return
    form = form_of(instruction.parts)
    metadata = None
    if instruction.parts[1] != "sync":
        form = _with_selector(instruction, form)
        metadata = block.whole(block.value(instruction.operands[4], 32))
    d, *sources = map(items_of, instruction.operands[:4])
    operands = ([block.value(item, form.register_bits) for item in items] for items in sources)
    for item, value in zip(d, multiply_registers(block, form, *operands, metadata=metadata)):
        block.define(item, value)


def multiply_registers(
    block: BlockBuilder, form: Form, *operands: Sequence[Value], metadata: Value | None = None
) -> list[Value]:
    """Adds an mma.sync or mma.sp to the block: the registers of D, of those of A, B and C."""
    operands = tuple([block.whole(value) for value in values] for values in operands)
    values = [value for values in operands for value in values]
    results = [(f"u{form.register_bits}", False)] * form.c_registers
    if form.in_core:
        number = block.context.number_of(form)
        return block.operation("warp_mma", *values, facts=[number], in_lanes=True, results=results, effects=False)
    call = Call(mma_sync, (form, *operands, metadata), effects=form.sparsity is not None)
    return block.anchor(call, results, [*values, metadata] if form.sparsity else values)
