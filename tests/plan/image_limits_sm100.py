"""Every limit of the SM100a kernel over images, in the words of `tests.plan.limits`.

Nothing here is read from the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cute_kernels.config import PatchEmbedImagesProblem, Sm100ImagesConfig
from cute_kernels.plan import make_plan
from tests.plan.limits import Limit, MakePlan

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)
BARE = replace(HEADLINE, table_rows=0)
PAIR = {"cta_group": 2, "tile_patches": 14, "tile_images": 16, "weight": "tmem"}
ONE = {"cta_group": 1, "tile_patches": 16, "tile_images": 16}


def images(problem: PatchEmbedImagesProblem = HEADLINE, sm_count: int | None = None, **config: Any) -> MakePlan:
    return partial(make_plan, problem, Sm100ImagesConfig(**config), sm_count=sm_count)


def limits() -> Iterator[Limit]:
    legal, last, large = (
        images(replace(HEADLINE, **values)) for values in ({}, {"channels_last": True}, {"patch": 32, "table_rows": 49})
    )
    yield Limit("strips of channels", legal, last, r"^channels_last = True:? .*neighbouring pixels.*value: False$")
    yield Limit("strips of 16 bytes", legal, large, r"^patch = 32: .*16 bytes of a strip.*value: 16$")
    yield from _sixteen_bits()
    yield from _fields()
    yield from _tensor_memory()
    yield from _stages()


def _field(
    name: str, legal: Any, illegal: Any, nearest: Any, problem: PatchEmbedImagesProblem = HEADLINE, reason: str = "",
    **config: Any,
) -> Limit:  # fmt: skip
    message = rf"^{name} = {illegal!r}: must be.*{reason}.*nearest legal value: {nearest!r}$"
    makes = [images(problem, **config, **{name: value}) for value in (legal, illegal)]
    makes.append(images(problem, **config, **{name: nearest}))
    makes[2]()  # what a refusal recommends is legal
    return Limit(f"SM100 images {name} {illegal}", *makes[:2], message)


def _sixteen_bits() -> Iterator[Limit]:
    """Of BF16 images a channel's weight has 128 columns or 65,536 B, and a row of a box is one patch's."""
    floats = replace(HEADLINE, in_dtype="bfloat16", precision="bf16")
    yield _field("source", "gather", "strips", "gather", floats)
    # 16 columns are left by 3 x 128; 9,216 B beside 3 x 65,536.
    for weight in (None, "tmem", "smem"):
        makes = [images(replace(floats, channels=c, table_rows=0), weight=weight) for c in (3, 4)]
        yield Limit(f"BF16 channels, weight in {weight}", *makes, r"^channels = 4: .*128 features has .*value: 3$")
    for name, legal, illegal, nearest in (
        ("out_dtype", "float16", "float32", "'bfloat16'"), ("patch", 16, 32, "16"),
    ):  # fmt: skip
        makes = [images(replace(floats, **{name: value, "table_rows": 0})) for value in (legal, illegal)]
        yield Limit(f"BF16 images on SM100, {name}", *makes, rf"^{name} = .*: must be.*value: {nearest}$")


def _fields() -> Iterator[Limit]:
    yield _field("source", "strips", "gather", "strips")
    yield _field("order", "image", "flat", "row")
    yield _field("weight", "smem", "registers", "tmem")
    for name, most in (("cta_group", 2), ("accumulators", 2), ("stage_blocks", 2)):
        yield _field(name, most, most + 1, most)
        yield _field(name, 1, 0, 1)
    yield _field("tmem_load_width", 32, 64, 32, tile_patches=16, tile_images=16)
    yield _field("tile_patches", 16, 17, 16, replace(BARE, width=512))
    yield _field("tile_patches", 1, 0, 1)
    yield _field("stages", 2, 1, 2, BARE, mma_columns=224, tile_patches=14, tile_images=16)
    pairs = [images(sm_count=sms, cta_group=2) for sms in (2, 1)]
    yield Limit("a pair's multiprocessors", *pairs, r"^sm_count = 1: .*pair needs 2 multiprocessors.*value: 2$")
    # N of kind::i8 is a multiple of 16, of a pair of 32 (PTX ISA, tcgen05.mma shapes): 14 patches x 8 or x 16 images.
    yield _field("tile_images", 16, 24, 16, reason="multiples of 16 up to 16 make N = 32 to 256", **_without(PAIR))
    yield _field("tile_images", 8, 9, 16, reason="multiples of 8 up to 16", cta_group=1, tile_patches=14)
    yield _field("tile_images", 1, -1, 1, cta_group=1, tile_patches=16)
    yield _field("mma_columns", 96, 100, 128, reason="multiple of 32, and the tile has 224", **PAIR)
    yield _field("mma_columns", 224, 256, 224, **PAIR)
    yield _field("mma_columns", 48, 40, 48, reason="multiple of 16", cta_group=1, tile_patches=14, tile_images=8)
    # Parts of 128 and 96 columns: 64 and 48 patches of each CTA.
    yield _field("tmem_load_width", 16, 32, 16, reason="an MMA tile has 48 of each", **PAIR)


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "tile_images"}


def _tensor_memory() -> Iterator[Limit]:
    """512 columns: 64 of weight for each channel, the others for accumulators."""
    yield _field("accumulators", 1, 2, 1, reason="192 columns of weight and 2 accumulators of 224 make 640", **PAIR)
    five = replace(BARE, channels=5)
    config = {"weight": "tmem", "accumulators": 1}
    yield _field("tile_images", 8, 16, 8, five, "320 columns of weight", cta_group=1, tile_patches=14, **config)
    yield _field("tile_patches", 12, 14, 12, five, "make 544", cta_group=2, tile_images=16, **config)
    for weight, most in ((None, 7), ("tmem", 7), ("smem", 6)):
        # 16 columns are left by 7 x 64. Barriers, two stages of 16 patches and their staging take 9,216 B of the
        # 232,448, and 32,768 B of weight fit six times beside them.
        makes = [images(replace(BARE, channels=channels), weight=weight) for channels in (most, most + 1)]
        message = rf"^channels = {most + 1}:? .*128 features has .*value: {most}$"
        yield Limit(f"channels with the weight in {weight}", *makes, message)


def _stages() -> Iterator[Limit]:
    # 6 x 28,672 + 1,024 + 4 x 14,336 B are 230,400 of 232,448.
    yield _field("stages", 6, 7, 6, reason="232,448 B", **PAIR)
    # 98,304 B of weight, 65,536 of staging and 1,024 leave 67,584: one stage of 65,536 B, two of half of that.
    yield _field("stage_blocks", 1, 2, 1, BARE, "two stages have to fit", weight="smem", stages=2, **ONE)
    # With four channels they leave 34,816: with 8 images 67,584, and a stage has 32,768.
    four = replace(BARE, channels=4)
    config = {"weight": "smem", "cta_group": 1, "tile_patches": 16, "stages": 2}
    yield _field("tile_images", 8, 16, 8, four, "two stages have to fit", **config)
    # 127 slots of 8 bytes beside the 4 of an address: two accumulators have four, the weight one.
    small = {"tile_patches": 1, "tile_images": 16, "cta_group": 1, "stage_blocks": 1}
    yield _field("stages", 61, 62, 61, replace(BARE, channels=1), "1,024 B of barriers hold those of 61", **small)
    yield _field("stages", 3, 2, 3, reason="read the 3 stages of a tile", **PAIR, mma_columns=128)
    # 131,072 B of weight, 57,344 of staging and 1,024 leave 43,008: three stages of 14,336 of the eight of a tile.
    config = {**PAIR, "weight": "smem", "stage_blocks": 1}
    yield _field("mma_columns", 224, 128, 224, four, "the 8 stages of a tile.*3 fit", **config)
