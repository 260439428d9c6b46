"""Every limit of the SM100a kernel over rows whose weight stays on chip, in the words of `tests.plan.limits`.

Nothing here is read from the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from cute_kernels.config import PatchEmbedProblem, Sm100ResidentConfig
from cute_kernels.plan import make_plan
from tests.plan.limits import Limit, MakePlan

PAIR = {"cta_group": 2, "tile_rows": 256, "tile_positions": 2, "weight": "tmem"}
ONE = {"cta_group": 1, "tile_rows": 16, "tile_positions": 1}


def rows(sm_count: int | None = None, sizes: dict[str, Any] | None = None, **config: Any) -> MakePlan:
    """4736 images of 196 positions, or other sizes."""
    problem = PatchEmbedProblem(**{"m": 928_256, "n": 768, "k": 768, "table_rows": 196} | (sizes or {}))
    return partial(make_plan, problem, Sm100ResidentConfig(**config), sm_count=sm_count)


def limits() -> Iterator[Limit]:
    yield from _fields()
    yield from _tiles()
    yield from _tensor_memory()
    yield from _stages()


def _field(
    name: str, legal: Any, illegal: Any, nearest: Any, reason: str = "", sizes: dict[str, Any] | None = None,
    **config: Any,
) -> Limit:  # fmt: skip
    message = rf"^{name} = {illegal!r}: must be.*{reason}.*nearest legal value: {nearest!r}$"
    makes = [rows(sizes=sizes, **config, **{name: value}) for value in (legal, illegal, nearest)]
    makes[2]()  # what a refusal recommends is legal
    return Limit(f"SM100, weight on chip: {name} {illegal} {sizes or ''}", *makes[:2], message)


def _fields() -> Iterator[Limit]:
    yield _field("weight", "smem", "streamed", "tmem")
    yield _field("order", "flat", "row", "position")
    yield _field("epilogue", "bf16x2", "f16", "f32")
    for name, most in (("cta_group", 2), ("accumulators", 2), ("stage_blocks", 2)):
        yield _field(name, most, most + 1, most)
        yield _field(name, 1, -1, 1)
    yield _field("tmem_load_width", 64, 128, 64)
    yield _field("tmem_load_width", 16, 8, 16)
    yield _field("stages", 2, 1, 2, mma_columns=128, tile_rows=128, cta_group=2)
    pairs = [rows(sm_count=sms, cta_group=2) for sms in (2, 1)]
    yield Limit("a pair's multiprocessors, weight on chip", *pairs, r"^sm_count = 1: .*pair needs 2 .*value: 2$")
    yield _field("order", "flat", "position", "flat", "an index", {"table_index": True})
    yield _field("order", "flat", "position", "flat", "whole images of 196 positions, m = 928257", {"m": 928_257})


def _tiles() -> Iterator[Limit]:
    # N of kind::i8 is a multiple of 16, of a pair of 32, up to 256 (PTX ISA, tcgen05.mma shapes).
    yield _field("tile_rows", 96, 80, 96, "multiple of 32 up to 256", cta_group=2)
    yield _field("tile_rows", 80, 72, 80, "multiple of 16 up to 256", cta_group=1)
    yield _field("tile_rows", 256, 272, 256, cta_group=1)
    yield _field("tile_rows", 16, -16, 16, cta_group=1)
    # Eight columns of an accumulator are one position's: 128 rows of a CTA are 16 x 8 images.
    yield _field("tile_positions", 16, 32, 1, "128 rows of a tile, a multiple of 8", tile_rows=256, cta_group=2)
    yield _field("tile_positions", 2, 3, 1, "128 rows of a tile, a multiple of 8", tile_rows=256, cta_group=2)
    yield _field("tile_positions", 2, -1, 1, tile_rows=256, cta_group=2)
    three = {"m": 30, "table_rows": 3}
    yield _field("tile_positions", 2, 4, 1, "position order has 3 positions", three, tile_rows=64, order="position")
    yield _field("tile_positions", 1, 2, 1, "consecutive ones", tile_rows=64, order="flat")
    yield _field("mma_columns", 96, 100, 128, "multiple of 32, and the tile has 256", **PAIR)
    yield _field("mma_columns", 256, 288, 256, **PAIR)
    yield _field("tmem_load_width", 16, 32, 16, "an MMA tile has 48 of each", **PAIR, mma_columns=96)


def _tensor_memory() -> Iterator[Limit]:
    """512 columns: 32 of weight for 128 bytes of K, the others for accumulators."""
    yield _field("accumulators", 1, 2, 1, "192 columns of weight and 2 accumulators of 256 make 704", **PAIR)
    long = {"weight": "tmem", "cta_group": 1, "tile_positions": 1}
    yield _field("tile_rows", 32, 48, 32, "480 columns of weight and 1 accumulators of 48", {"k": 1920}, **long)
    # 16 columns are left by 15 x 32 of 512; 232,448 B hold 13 x 16,384 of weight beside barriers, two stages of 16 rows
    # and their staging, 9,216 B. Of 16-bit elements half as many.
    for weight, blocks in ((None, 15), ("tmem", 15), ("smem", 13)):
        for dtype, elements in (("float8_e4m3fn", 128), ("bfloat16", 64)):
            most = blocks * elements
            makes = [rows(sizes={"k": k, "in_dtype": dtype}, weight=weight) for k in (most, most + 16)]
            message = rf"^k = {most + 16}:? .*128 features stays on chip.*value: {most}$"
            yield Limit(f"K of {dtype} with the weight in {weight}", *makes, message)


def _stages() -> Iterator[Limit]:
    # 10 x 16,384 + 1,024 + 4 x 16,384 B are 230,400 of 232,448.
    yield _field("stages", 10, 11, 10, "232,448 B", **PAIR)
    yield _field("stages", 6, 5, 6, "read the 6 stages of a tile", **PAIR, mma_columns=128)
    # 98,304 B of weight, 65,536 of staging and 1,024 leave 67,584: one stage of 65,536 B, two of half of that.
    whole = {"weight": "smem", "cta_group": 1, "tile_rows": 256, "tile_positions": 1, "mma_columns": 256}
    yield _field("stage_blocks", 1, 2, 1, "two stages have to fit", stages=2, **whole)
    # With K = 1024 they leave 34,816: a stage has 32,768 B. Of 192 rows two fit:
    # 131,072 + 1,024 + 49,152 + 2 x 24,576 = 230,400.
    yield _field(
        "tile_rows", 192, 256, 192, "two stages have to fit", {"k": 1024}, weight="smem", cta_group=1, stages=2,
        tile_positions=1,
    )  # fmt: skip
    # 127 slots of 8 bytes beside the 4 of an address: two accumulators have four, the weight one.
    yield _field("stages", 61, 62, 61, "1,024 B of barriers hold those of 61", {"k": 128}, **ONE)
