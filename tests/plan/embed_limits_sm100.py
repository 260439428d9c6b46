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
    yield from _epilogue()
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
    for table in ("blocked", "interleaved"):
        at, beyond = {"order": "flat", "table": table}, {"order": "position", "table": table}
        yield _config(f"{table} table", at, beyond, f"^table = '{table}':? .*same table row; .*value: 'row_major'$")


def _epilogue() -> Iterator[Limit]:
    # Five warps split 128 columns: two of them have 64.
    narrow = {"tile_n": 128, "tmem_load_width": 64}
    message = "^tmem_loads = 2: .*2 loads of 64 columns exceed the 64 of a warp; nearest legal value: 1$"
    yield _config("loads in flight", narrow, narrow | {"tmem_loads": 2}, message)
    yield _config(
        "loads in flight of four warps", narrow | {"tmem_loads": 2, "epilogue_warps": 4}, narrow | {"tmem_loads": 2},
        message,
    )  # fmt: skip
    wide = {"tmem_load_width": 64, "table_ahead": True}
    message = "^table_ahead = True:? .*two steps of 128 columns.*nearest legal value: False$"
    yield _config("table values ahead", wide, wide | {"tmem_loads": 2}, message)
    makes = (embed("sm_100a", replace(BASE, store="direct"), n=n) for n in (784, 776))
    yield Limit("embed sm_100a: 32-byte stores", *makes, "^store = 'direct':? .*n = 776; nearest legal value: 'tma'$")


def _staging() -> Iterator[Limit]:
    message = "^store_group = 3: .*in 2 buffers; nearest legal value: 2$"
    yield _config("buffers", {"store_buffers": 2, "store_group": 2}, {"store_buffers": 2, "store_group": 3}, message)
    for field, value, default in (("store_group", 2, 1), ("store_buffers", 2, 4)):
        for store in ("coalesced", "direct"):
            refused = f"store = '{store}' issues no TMA stores"
            message = f"^{field} = {value}: .*{refused}; nearest legal value: {default}$"
            at, beyond = {"store": "tma", field: value}, {"store": store, field: value}
            yield _config(f"{field} of {store}", at, beyond, message)
    # 1,024 B, stages of 32,768 B, and staging: buffers of 4,096 B, so many in each warp, or 32 padded rows of 528 B in
    # three warps and of 272 B in two.
    for what, fields, most in (
        ("two buffers", {"store_buffers": 2, "epilogue_warps": 4}, 6),
        ("two buffers of five warps", {"store_buffers": 2}, 5),
        ("one buffer", {"store_buffers": 1}, 6),
        ("padded rows", {"store": "coalesced"}, 4),
        ("no staging", {"store": "direct"}, 7),
    ):
        message = f"^stages = {most + 1}:? .*limit is {SMEM_BYTES:,} B; nearest legal value: {most}$"
        yield _config(f"stages beside {what}", fields | {"stages": most}, fields | {"stages": most + 1}, message)
    # One CTA holds 128 rows of x and all 256 of the weight: 49,152 B, beside 65,536 B of staging.
    message = f"^stages = 4: .*limit is {SMEM_BYTES:,} B; nearest legal value: 3$"
    yield _config("stages of one CTA", {"cta_group": 1, "stages": 3}, {"cta_group": 1, "stages": 4}, message)
