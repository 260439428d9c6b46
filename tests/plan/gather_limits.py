"""Every limit of the SM90a kernel that gathers 16-bit patches, in the words of `tests.plan.limits`.

Nothing here is read from the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cute_kernels.config import PatchEmbedImagesProblem, Sm90GatherConfig
from cute_kernels.plan import make_plan
from tests.plan.limits import Limit, MakePlan

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, "bfloat16", precision="bf16", table_rows=196)
BARE = replace(HEADLINE, table_rows=0)
TILE = {
    "tile_patches": 2, "tile_rows": 1, "tile_images": 128, "row_patches": 2, "tile_n": 192, "cluster": 2,
    "store_stages": 1,
}  # fmt: skip


def gather(problem: PatchEmbedImagesProblem = HEADLINE, sm_count: int | None = None, **config: Any) -> MakePlan:
    return partial(make_plan, problem, Sm90GatherConfig(**config), "sm_90a", sm_count=sm_count)


def limits() -> Iterator[Limit]:
    yield from _fields()
    yield from _tiles()
    yield from _problems()


def _field(
    name: str, legal: Any, illegal: Any, nearest: Any, problem: PatchEmbedImagesProblem = HEADLINE, **others: Any
) -> Limit:
    message = rf"^{name} = {illegal!r}: must be.*nearest legal value: {nearest!r}$"
    makes = [gather(problem, **others | {name: value}) for value in (legal, illegal)]
    return Limit(f"gather {name} {illegal}, {problem.patch} pixels, {len(others)} others", *makes, message)


def _fields() -> Iterator[Limit]:
    for name in ("tile_patches", "tile_rows", "tile_images"):
        yield _field(name, None, 0, 1)
    yield _field("row_patches", 2, 3, 2)
    yield _field("tile_n", 256, 257, 256)
    yield _field("tile_n", 64, 65, 64)
    yield _field("cluster", 4, 5, 4)
    yield _field("cluster", 2, 3, 2)
    yield _field("order", "row", "flat", "row")
    yield _field("stages", 2, 1, 2)
    yield _field("store_stages", None, 0, 1)
    # 57,344 B a stage, 1,024 B of barriers and 8 x 2,048 B of store buffers: three fit 232,448 B.
    yield _field("stages", 3, 4, 3, **TILE)
    # Twelve buffers of 32 columns a tile; beside two stages there is room for seven times 16,384 B.
    wide = replace(HEADLINE, out_dtype="float32")
    yield _field("store_stages", 6, 12, 6, wide, **TILE | {"stages": 2})
    yield _field("store_stages", 6, 7, 6, **TILE)
    for sms, name in ((2, "a cluster's multiprocessors of gather"), (1, "one multiprocessor of gather")):
        message = rf"^sm_count = {sms - 1}:? .*value: {sms}$"
        yield Limit(name, gather(sm_count=sms, cluster=sms), gather(sm_count=sms - 1, cluster=sms), message)


def _tiles() -> Iterator[Limit]:
    yield _field("tile_patches", 16, 15, 8)
    yield _field("tile_images", 256, 257, 256, row_patches=1, tile_patches=1, tile_rows=1)
    yield _field("tile_patches", 2, 1, 2, row_patches=2, tile_rows=1)
    # 128 or 256 patches for two warpgroups together, 64 or 128 for each by itself.
    yield _field("tile_images", 64, 32, 64, tile_patches=2, tile_rows=1)
    yield _field("tile_images", 128, 256, 128, tile_patches=2, tile_rows=1)
    yield _field("tile_images", 64, 128, 64, tile_patches=2, tile_rows=1, pingpong=True)
    yield _field("tile_rows", 16, 32, 16, tile_patches=16, tile_images=1)
    # One patch of each of 64 pieces: four of each of 32 make 128.
    wide = replace(HEADLINE, width=256, table_rows=224)
    yield _field("row_patches", 2, 4, 2, wide, tile_patches=4, tile_rows=1, tile_images=32)
    yield _field("row_patches", 2, 4, 2, tile_patches=4, tile_rows=1)  # of 14 patches
    half = replace(BARE, patch=32)
    yield _field("row_patches", 1, 2, 1, half, tile_patches=4, tile_rows=1, tile_images=32)  # 7 patches of 32 pixels
    yield _field("row_patches", 2, 4, 2, replace(half, width=256), tile_patches=4, tile_rows=1)
    # Two rows of pixels in a stage with p = 32, 64 images with p = 64, whose one row they follow.
    yield _field("cluster", 2, 4, 2, half)
    whole = replace(BARE, patch=64, width=256, height=256)
    yield _field("cluster", 2, 4, 2, whole, tile_patches=4, tile_rows=16, tile_images=2)
    # 256 registers of accumulators of 240, of which 40 are for addressing.
    yield _field("tile_n", 192, 256, 192, **TILE | {"tile_n": None})


def _problems() -> Iterator[Limit]:
    def change(legal: dict[str, Any], illegal: dict[str, Any], message: str, **config: Any) -> Limit:
        makes = [gather(replace(HEADLINE, **values), **config) for values in (legal, illegal)]
        return Limit(f"gather with {illegal}", *makes, message)

    yield change({}, {"in_dtype": "float16"}, r"^in_dtype = 'float16':? .*'bf16'.*value: 'bfloat16'$")
    yield change({}, {"in_dtype": "uint8", "precision": "int8"}, r"^precision = 'int8':? .*value: 'bf16'$")
    yield change({"out_dtype": "float32"}, {"out_dtype": "float64"}, r"^out_dtype = 'float64':? .*value: 'bfloat16'$")
    yield change({}, {"channels_last": True}, r"^channels_last = True:? .*order of the channels.*value: False$")
    yield change({"patch": 32, "table_rows": 0}, {"patch": 14, "table_rows": 0}, r"^patch = 14: .*value: 16$")
    yield change({"patch": 16}, {"patch": 0, "table_rows": 0}, r"^patch = 0: .*value: 16$")
    yield change({"n": 8, "out_dtype": "float32"}, {"n": 10, "out_dtype": "float32"}, r"^n = 10: .*value: 12$")
    # Two tiles of features for every image, of 2^31 - 1 numbers less those of 132 clusters.
    one = {"height": 128, "width": 256, "n": 128, "table_rows": 0, "channels": 1}
    tile = {"tile_patches": 16, "tile_rows": 8, "tile_images": 1, "tile_n": 64, "cluster": 1, "row_patches": 2}
    message = r"^batch = 1073741758: .*32-bit.*value: 1073741757$"
    yield change(one | {"batch": 1_073_741_757}, one | {"batch": 1_073_741_758}, message, **tile)
    # 4 x 256 padded features, 2^21 positions.
    tall = [{"channels": 1, "width": 16, "n": 8, "height": 16 * s, "table_rows": s} for s in (2**21 - 1, 2**21)]
    message = r"^height = 33554432: .*indexed with 32 bits.*value: 33554416$"
    yield change(*tall, message, tile_n=256, cluster=4, tile_patches=1, tile_rows=128, tile_images=1)
