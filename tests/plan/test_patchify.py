"""Plans of the pass that lays out images as rows of patches: widths by alignment, and every limit at its edge."""

from __future__ import annotations

import dataclasses

import pytest

from cute_kernels.plan.base import ARCHS
from cute_kernels.plan.patchify import PatchifyPlan, PatchifyProblem, plan_patchify

PROBLEM = PatchifyProblem(4, 3, 224, 224, 16)


def plan(**changes: object) -> PatchifyPlan:
    return plan_patchify(dataclasses.replace(PROBLEM, **changes), ARCHS["sm_90a"])


@pytest.mark.parametrize(
    ("changes", "load", "unit", "store", "row"),
    [
        ({}, 16, 16, 16, 768),
        ({"patch": 14}, 16, 2, 16, 608),
        ({"patch": 14, "width": 42}, 4, 2, 4, 608),
        ({"patch": 32}, 16, 16, 16, 3072),
        ({"patch": 7}, 16, 1, 16, 160),
        ({"patch": 7, "width": 217}, 1, 1, 4, 160),
        ({"channels_last": True, "order": "hwc"}, 16, 16, 16, 768),
        ({"channels_last": True}, 16, 1, 4, 768),
        ({"in_dtype": "bfloat16", "out_dtype": "bfloat16"}, 8, 8, 8, 768),
        ({"in_dtype": "bfloat16", "out_dtype": "bfloat16", "patch": 14}, 8, 2, 8, 592),
        ({"in_dtype": "float32", "out_dtype": "bfloat16", "patch": 14}, 4, 2, 8, 592),
        ({"patch": 14, "channels": 21}, 4, 2, 4, 4128),  # 258 vectors of a row, for 256 threads
        ({"in_dtype": "float32", "out_dtype": "bfloat16"}, 4, 4, 4, 768),
        ({"out_dtype": "bfloat16"}, 16, 8, 8, 768),
    ],
)
def test_widths(changes, load, unit, store, row):
    """Loads of 16 bytes where every strip begins on them, stores of 4 bytes at least; rows are whole 16 bytes.

    Of patches whose rows are no whole vectors in images whose rows are, vectors are gathered: loads and stores of 16.
    """
    made = plan(**changes)
    assert (made.load_pixels, made.unit, made.store_elements, made.row_elements) == (load, unit, store, row)


def test_a_row_of_patches_fits_shared_memory_to_the_byte():
    """232,448 B of shared memory (CUDA C++ programming guide, compute capability 9.0)."""
    assert plan(channels=1, patch=16, width=14528, height=16).smem_bytes == 232_448
    with pytest.raises(ValueError, match="width = 14544:? .*232,704 B of shared memory.* nearest legal value: 14528"):
        plan(channels=1, patch=16, width=14544, height=16)


def test_vectors_are_gathered_where_a_pad_between_rows_of_pixels_fits():
    """14 rows of 16,464 bytes and 40 more are 231,056 of 232,448 B; two rows of half of these leave no room."""
    wide = {"channels": 1, "patch": 14, "height": 14}
    roomy = plan(**wide, width=16_464)
    assert roomy.gathers_vectors and roomy.smem_bytes == 231_056
    tight = plan(channels=1, patch=2, height=2, width=116_224)  # 2 x 116,224 B are all of it
    assert not tight.gathers_vectors and tight.smem_bytes == 232_448


def test_a_grid_has_less_than_two_to_the_31_ctas():
    assert plan(batch=2**31 - 1, height=16).clusters == 2**31 - 1
    with pytest.raises(ValueError, match=f"batch = {2**31}:? .*nearest legal value: {2**31 - 1}"):
        plan(batch=2**31, height=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 230}, "height = 230:? .*whole patches of 16 pixels; nearest legal value: 224"),
        ({"width": 8}, "width = 8:? .*nearest legal value: 16"),
        ({"batch": 0}, "batch = 0:? .*nearest legal value: 1"),
        ({"patch": 0}, "patch = 0: "),
        ({"channels": 0}, "channels = 0: "),
        ({"in_dtype": "int8"}, "in_dtype = 'int8'"),
        ({"in_dtype": "bfloat16", "out_dtype": "uint8"}, "out_dtype = 'uint8'"),
        ({"order": "hwc"}, "order = 'hwc'"),
        ({"order": "whc"}, "order = 'whc'"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_positions_are_whole_patches():
    assert (PROBLEM.positions, dataclasses.replace(PROBLEM, width=48).positions) == (196, 42)
