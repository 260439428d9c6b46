"""Limits of the SM100a kernel over rows that concern the order of its rows and its epilogue.

In the words of `tests.plan.limits`; nothing here is read from the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cute_kernels.config import Sm100PatchEmbedConfig
from tests.plan.limits import SMEM_BYTES, Limit, embed

BASE = Sm100PatchEmbedConfig()


def limits() -> Iterator[Limit]:
    yield from _orders()
    yield from _staging()


def _config(what: str, at: dict, beyond: dict, message: str, **problem) -> Limit:
    makes = (embed("sm_100a", replace(BASE, **fields), **problem) for fields in (at, beyond))
    return Limit(f"embed sm_100a: {what}", *makes, message)


def _orders() -> Iterator[Limit]:
    yield _config(
        "an index", {"order": "flat"}, {"order": "position"}, "own table row; nearest legal value: 'flat'$",
        table_index=True,
    )  # fmt: skip
    position = {"config": replace(BASE, order="position")}
    makes = (embed("sm_100a", **position, m=m) for m in (196 * 64, 196 * 64 + 1))
    yield Limit("embed sm_100a: whole images", *makes, "whole images of 196 positions, m = 12545; .*value: 'flat'$")
    # A warp has 32 rows: of 256 or 128 in a tile there are eight or four positions at most.
    for group, most in ((2, 8), (1, 4)):
        base = {"order": "position", "cta_group": group, "stages": 3}
        at, beyond = (base | {"tile_positions": positions} for positions in (most, 2 * most))
        message = f"^tile_positions = {2 * most}:? .*32 images or more.*nearest legal value: {most}$"
        yield _config(f"positions of a tile, cta_group {group}", at, beyond, message)
    makes = (embed("sm_100a", replace(BASE, tile_positions=p), m=15 * 64, table_rows=3) for p in (2, 4))
    yield Limit("embed sm_100a: positions of an image", *makes, "^tile_positions = 4: .*has 3 positions; .*value: 2$")
    # No table of its own row per element: the rows of a tile are whatever follows.
    yield _config(
        "flat order", {"order": "flat", "tile_positions": 1}, {"order": "flat", "tile_positions": 2},
        "^tile_positions = 2: .*consecutive ones.*nearest legal value: 1$",
    )  # fmt: skip
    makes = (embed("sm_100a", replace(BASE, tile_positions=p), m=195 * 64) for p in (None, 2))
    yield Limit("embed sm_100a: rows that are no images", *makes, "^tile_positions = 2: .*consecutive ones.*value: 1$")
    at, beyond = {"order": "flat", "table": "interleaved"}, {"order": "position", "table": "interleaved"}
    message = "^table = 'interleaved':? .*same table row; .*value: 'row_major'$"
    yield _config("interleaved table", at, beyond, message)


def _staging() -> Iterator[Limit]:
    # 1,024 B, stages of 32,768 B, and staging: buffers of 4,096 B, so many in each warp.
    for what, fields, most in (
        ("two buffers", {"store_buffers": 2, "epilogue_warps": 4}, 6),
        ("two buffers of five warps", {"store_buffers": 2}, 5),
        ("one buffer", {"store_buffers": 1}, 6),
    ):
        message = f"^stages = {most + 1}:? .*limit is {SMEM_BYTES:,} B; nearest legal value: {most}$"
        yield _config(f"stages beside {what}", fields | {"stages": most}, fields | {"stages": most + 1}, message)
    # One CTA holds 128 rows of x and all 256 of the weight: 49,152 B, beside 65,536 B of staging.
    message = f"^stages = 4: .*limit is {SMEM_BYTES:,} B; nearest legal value: 3$"
    yield _config("stages of one CTA", {"cta_group": 1, "stages": 3}, {"cta_group": 1, "stages": 4}, message)
