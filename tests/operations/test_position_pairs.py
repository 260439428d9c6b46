"""Positions of two tables: `patch_embed` with ``pos_index`` of pairs, against a sum that is written out."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import patch_embed
from cute_kernels.operations.runtime.constants import DERIVED


def call(rows: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (*rows, 64), dtype=torch.uint8, generator=generator)
    weight = torch.randint(-127, 128, (24, 64), dtype=torch.int8, generator=generator)
    index = torch.randint(-1, 9, (*rows, 2), generator=generator).to(dtype)
    index.view(-1, 2)[-3:] = -1  # padding
    tables = torch.randn(2, 9, 24, generator=generator)
    return {"x": x, "weight": weight, "pos_embed": tables, "pos_index": index}


def written_out(x, weight, pos_embed, pos_index, scale) -> torch.Tensor:
    sums = (x.long().reshape(-1, x.shape[-1]) @ weight.long().t()).double() * scale
    for row, pair in enumerate(pos_index.reshape(-1, 2).tolist()):
        both = torch.zeros(weight.shape[0], dtype=torch.float32)
        for axis, position in enumerate(pair):
            if position >= 0:
                both = both + pos_embed[axis, position].float()
        sums[row] += both.double()
    return sums.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [(40,), (2, 20)])
def test_rows_get_the_sum_of_two_positions(rows: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    given = call(rows, dtype)
    scale = 2.0**-12
    got = patch_embed(**given, scale_a=scale, backend=backend)
    expected = written_out(**given, scale=scale)
    assert got.shape == expected.shape
    assert torch.equal(got, expected.float().to(torch.bfloat16))  # sums of integers and a power of two are exact
    alone = patch_embed(given["x"], given["weight"], scale_a=scale, backend="reference").view(-1, 24)[-3:]
    assert torch.equal(got.view(-1, 24)[-3:], alone)


def test_sums_are_made_once_and_anew_after_a_write() -> None:
    given = call((40,), torch.int32)
    first = patch_embed(**given)
    misses = DERIVED.misses
    assert torch.equal(patch_embed(**given), first) and DERIVED.misses == misses
    given["pos_embed"].neg_()
    given["pos_index"].add_(0)
    assert not torch.equal(patch_embed(**given), first)
    expected = written_out(**given, scale=1.0)
    assert torch.equal(patch_embed(**given), expected.float().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pos_index": torch.zeros(40, dtype=torch.int32)}, ValueError, r"pos_index has shape \[40\] .* \[40, 2\]"),
        ({"pos_index": torch.zeros(40, 3, dtype=torch.int32)}, ValueError, r"pos_index has shape \[40, 3\]"),
        ({"pos_index": torch.zeros(40, 2)}, TypeError, "pos_index torch.float32"),
        ({"pos_index": torch.full((40, 2), 9)}, ValueError, "numbers from 9 to 9: must be -1 to 8"),
        ({"pos_index": torch.full((40, 2), -2)}, ValueError, "numbers from -2 to -2"),
        ({"pos_embed": torch.zeros(3, 9, 24)}, ValueError, r"pos_embed has shape \[3, 9, 24\]"),
        ({"pos_embed": torch.zeros(2, 9, 16)}, ValueError, "N = 24"),
        ({"pos_index": None}, ValueError, "pos_embed"),
    ],
)
def test_what_is_refused(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        patch_embed(**(call((40,), torch.int32) | change))
