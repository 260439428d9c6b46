"""Forms of the tensor core beside FP32 sums: INT8, FP16 accumulators, tcgen05.cp."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from cute_kernels.emulator.errors import TensorMemoryRace, UnsupportedPTX
from cute_kernels.emulator.machine.state.tmem import rectangle, tensor_address
from cute_kernels.emulator.machine.units.matrix.operands import decode_instruction
from cute_kernels.emulator.machine.units.matrix.tensor_copy import copy_to_tensor_memory
from tests.emulator.isa.instructions.test_sm90_cases import nearest
from tests.emulator.machine.units.matrix.test_exact import rational_dot
from tests.emulator.machine.units.matrix.test_tensor_core import A, B, Layout, Machine, idesc

# --- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a_type, b_type", [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integers_are_exact_and_wrap_or_saturate(a_type: str, b_type: str, saturate: bool) -> None:
    rng = np.random.default_rng(3)
    machine, codes = Machine(1), {"s8": 1, "u8": 0}
    operands = [rng.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (128, 64)]
    layouts = [Layout("128B", False, 1, rows) for rows in (128, 64)]
    for base, values, layout in zip((A, B), operands, layouts):
        machine.write(0, base, layout.place(values))
    old = rng.choice([-(1 << 31), (1 << 31) - 1, 12345], (128, 64)).astype(np.int32)
    machine.tmem[0].floats[:64] = old.view(np.float32).T
    machine.tmem[0].check(0, 128, 0, 64, write=True)
    word = 2 << 4 | saturate << 3 | codes[a_type] << 7 | codes[b_type] << 10 | 64 // 8 << 17 | 128 // 16 << 24
    descriptors = [layout.descriptor(base) for base, layout in zip((A, B), layouts)]
    machine.mma(
        kind="i8", cta_group=1, rank=0, d=0, a=descriptors[0], b=descriptors[1], instruction=word, accumulate=True
    )
    a, b = (x.view(np.int8 if t == "s8" else np.uint8).astype(np.int64) for x, t in zip(operands, (a_type, b_type)))
    exact = a @ b.T + old
    wanted = np.clip(exact, -(1 << 31), (1 << 31) - 1) if saturate else (exact + (1 << 31)) % (1 << 32) - (1 << 31)
    assert (exact != wanted).any()
    assert np.array_equal(machine.tmem[0].floats[:64].T.view(np.int32), wanted)


def test_integer_descriptors_have_their_own_rules() -> None:
    base = 64 // 8 << 17 | 128 // 16 << 24
    wrong = {1 << 4: "D type 1", 2 << 4 | 1 << 13: "negation", 2 << 4 | 2 << 7: "A type 2"}
    for word, message in ((base | bits, message) for bits, message in wrong.items()):
        with pytest.raises(UnsupportedPTX, match=message):
            decode_instruction("i8", 1, word)


# --- FP16 accumulators ------------------------------------------------------------------------------------------------


def test_fp16_accumulators_round_once_and_lie_in_the_low_halves() -> None:
    rng = np.random.default_rng(8)
    machine = Machine(1)
    operands = [(rng.standard_normal((rows, 16)) * 3).astype(np.float16) for rows in (128, 16)]
    layouts = [Layout("128B", False, 2, rows) for rows in (128, 16)]
    for base, values, layout in zip((A, B), operands, layouts):
        machine.write(0, base, layout.place(values))
    old = rng.standard_normal((128, 16)).astype(np.float16)
    machine.tmem[0].cells[:16] = old.view(np.uint16).T.astype(np.uint32) | np.uint32(0xABCD0000)
    machine.tmem[0].check(0, 128, 0, 16, write=True)
    a, b = (layout.descriptor(base) for base, layout in zip((A, B), layouts))
    word = idesc("f16", "f16", 128, 16) & ~(3 << 4)
    machine.mma(kind="f16", cta_group=1, rank=0, d=0, a=a, b=b, instruction=word, accumulate=True)
    expected = np.zeros((128, 16), np.float16)
    for i, j in np.ndindex(128, 16):
        total = rational_dot(operands[0][i].astype(float), operands[1][j].astype(float)) + Fraction(float(old[i, j]))
        expected[i, j] = nearest(total, np.float16)
    assert np.array_equal(machine.tmem[0].cells[:16].T & 0xFFFF, expected.view(np.uint16))
    registers = machine.tmem[0].load(1, tensor_address(32, 0), "32x32b", 8, pack=True)
    assert np.array_equal(np.ascontiguousarray(registers).view(np.float16), expected[32:64])
    with pytest.raises(UnsupportedPTX, match="BF16 operands with an FP16 accumulator"):
        decode_instruction("f16", 1, idesc("bf16", "bf16", 128, 16) & ~(3 << 4))


# --- tcgen05.cp -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("swizzle", ["none", "32B", "128B"])
@pytest.mark.parametrize(
    "shape, multicast, source_rows",
    [
        ("128x256b", "", [*range(128)]),
        ("128x128b", "", [*range(128)]),
        ("64x128b", "warpx2::02_13", [*range(64), *range(64)]),
        ("64x128b", "warpx2::01_23", [*range(32), *range(32), *range(32, 64), *range(32, 64)]),
        ("32x128b", "warpx4", [*range(32)] * 4),
    ],
)
def test_copies_to_tensor_memory(
    shape: str, multicast: str, source_rows: list[int], swizzle: str, cta_group: int
) -> None:
    """Lane l holds row source_rows[l], four bytes to a column."""
    machine = Machine(2, policy="lazy")
    rows, nbytes = max(source_rows) + 1, int(shape.split("x")[1][:-1]) // 8
    layout = Layout(swizzle, False, 1, rows)
    data = [np.random.default_rng(rank).integers(0, 256, (rows, 32)).astype(np.uint8) for rank in range(2)]
    for rank in range(cta_group):
        machine.write(rank, A, layout.place(data[rank]))
    matrix = layout.descriptor(A)
    copy_to_tensor_memory(
        machine.core, shape=shape, multicast=multicast, cta_group=cta_group, rank=0, address=8, matrix=matrix
    )
    with pytest.raises(TensorMemoryRace, match=r"which the tcgen05\.cp.* wrote: it is not known to be complete"):
        machine.crew.tracker.tensor.load(machine.crew[0].agent, rectangle(8, "32x32b", 1), 0)
    machine.engine.drain()
    for rank in range(cta_group):
        expected = data[rank][source_rows, :nbytes].copy().view(np.uint32)
        places = [(warp, tensor_address(32 * warp, 8), "32x32b", nbytes // 4) for warp in range(4)]
        assert np.array_equal(np.concatenate([machine.tmem[rank].load(*place) for place in places]), expected)


def test_other_copies_are_refused() -> None:
    machine, layout = Machine(1), Layout("128B", False, 1, 128)
    with pytest.raises(UnsupportedPTX, match="64x128b"):
        matrix = layout.descriptor(A)
        copy_to_tensor_memory(
            machine.core, shape="64x128b", multicast="", cta_group=1, rank=0, address=0, matrix=matrix
        )
