"""Structured sparsity of mma.sp: which elements of B go with those of A that are stored.

Two of every four units of K are stored. A unit is an element of 8 or 16 bits, half one of TF32, of which one of every
two is stored, or a pair of elements of four bits. Two bits of metadata for each stored unit are its place among the
four.
(PTX ISA, "Sparse matrix storage" and "Matrix fragments for multiply-accumulate operation with sparse matrix A"; the
order of the words as CUTLASS's ``reorder_meta`` has it for these instructions.)
"""

import numpy as np

from cute_kernels.emulator.errors import IllegalAccess

_ROWS = 16
_TF32 = (0b0100, 0b1110)  # the only pairs of places that mean something


def threads_with_metadata(stored_bytes: int, unit: int) -> int:
    """Threads of every four whose metadata an instruction uses; selectors count groups of so many."""
    return stored_bytes // 16 if unit == 2 else stored_bytes // 8


def places(metadata: np.ndarray, selector: int, stored_bytes: int, unit: int) -> np.ndarray:
    """Where in K the stored units belong. ``metadata``: uint32 [count, 32] of the lanes. ``selector``: which threads of
    every four give it. ``stored_bytes``: of a row of A. ``unit``: bytes of a unit, 1 or 2. Returns int64 [count, 16
    rows, units], in units."""
    threads = threads_with_metadata(stored_bytes, unit)
    words = metadata.reshape(-1, 8, 4)[:, :, selector * threads : (selector + 1) * threads]
    count = len(words)
    if unit == 2:  # a thread has eight units of row g in its lower half, of row g + 8 in its upper one
        codes = np.ascontiguousarray(words).view(np.uint16).reshape(count, 8, threads, 2).transpose(0, 3, 1, 2)
    else:  # threads in turn have sixteen units of row g and of row g + 8
        codes = words.reshape(count, 8, threads // 2, 2).transpose(0, 3, 1, 2)
    codes = codes.reshape(count, _ROWS, -1, 1)
    two_bits = (codes >> np.arange(0, 16 // unit * 2, 2).astype(codes.dtype) & 3).astype(np.int64)
    two_bits = two_bits.reshape(count, _ROWS, -1)
    return two_bits + np.arange(two_bits.shape[-1]) // 2 * 4


def check_places(found: np.ndarray, stored: np.ndarray, *, ordered: bool, tf32: bool) -> None:
    """Raises IllegalAccess where metadata means nothing, unless both units that it places are 0. ``found``: of
    `places`. ``stored``: the units, [count, 16, units]. ``ordered``: of mma.sp::ordered_metadata: the first place has
    to be below the second. ``tf32``: units are halves of elements."""
    first, second = found[..., ::2] & 3, found[..., 1::2] & 3
    wrong = first >= second if ordered else first == second
    if tf32:
        wrong = ~np.isin(first | second << 2, _TF32)
    wrong &= (stored[..., ::2] != 0) | (stored[..., 1::2] != 0)
    if not wrong.any():
        return
    _, row, chunk = (int(x) for x in np.argwhere(wrong)[0])
    code = int(first[wrong][0] | second[wrong][0] << 2)
    legal = "0b0100 and 0b1110" if tf32 else "two places in increasing order" if ordered else "two different places"
    raise IllegalAccess(f"metadata {code:#06b} of mma.sp in row {row}, chunk {chunk} of A: {legal} are legal")


def of_each_row(b: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The units of B that go with each row of A: [count, n, units of K] -> [count, 16, n, stored units]."""
    return np.take_along_axis(b[:, None], found[:, :, None], -1)
