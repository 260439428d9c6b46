"""Positions and masks of bits: fns, bmsk."""

from __future__ import annotations

import numpy as np

from cute_kernels.emulator.block import BlockBuilder
from cute_kernels.emulator.decode import Instruction
from cute_kernels.emulator.instructions_integer import apply, signed
from cute_kernels.emulator.instructions_registry import family, qualifiers
from cute_kernels.emulator.scalars import fns_int
from cute_kernels.emulator.values import PureOp


def _nth_set(mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    rows = zip(*(x.ravel().tolist() for x in np.broadcast_arrays(mask, base, offset)))
    return np.array([fns_int(*row) for row in rows], np.uint32).reshape(np.broadcast(mask, base, offset).shape)


_FNS = PureOp("fns_b32", ("u32", "u32", "s32"), "u32", _nth_set, f"fns_int({{0}}, {{1}}, {signed('{2}', 32)})")


@family("fns.b32")
def _fns(block: BlockBuilder, instruction: Instruction) -> None:
    """fns: the n-th set bit from a position on, upwards or downwards."""
    qualifiers(instruction, "b32")
    apply(block, instruction, _FNS)


def _mask_of_clamped(position: np.ndarray, width: np.ndarray) -> np.ndarray:
    position, width = (np.minimum(x, 32).astype(np.uint64) for x in (position, width))
    return ((((np.uint64(1) << width) - np.uint64(1)) << position) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _mask_of_wrapped(position: np.ndarray, width: np.ndarray) -> np.ndarray:
    return _mask_of_clamped(position & np.uint32(31), width & np.uint32(31))


_BMSK = {
    "clamp": PureOp("bmsk_clamp", ("u32", "u32"), "u32", _mask_of_clamped),
    "wrap": PureOp("bmsk_wrap", ("u32", "u32"), "u32", _mask_of_wrapped),
}


@family("bmsk.clamp.b32", "bmsk.wrap.b32")
def _bmsk(block: BlockBuilder, instruction: Instruction) -> None:
    """bmsk: ones from a position on, so many as a width says, both limited to 32 or taken modulo 32."""
    qualifiers(instruction, "b32", skip=2)
    apply(block, instruction, _BMSK[instruction.parts[1]])
