"""Every limit of the SM90a kernel over images, in the words of `tests.plan.limits`.

Nothing here is read from the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cute_kernels.config import PatchEmbedImagesProblem, Sm90ImagesConfig
from cute_kernels.plan import ARCHS, make_plan
from cute_kernels.plan.images_sm90 import checked_plan
from tests.plan.limits import TMA_ROWS, Limit, MakePlan

HEADLINE = PatchEmbedImagesProblem(4736, 3, 224, 224, 16, 768, table_rows=196)
FOURTEEN = replace(HEADLINE, patch=14, table_rows=256)
BARE = replace(HEADLINE, table_rows=0)
GRAY = replace(BARE, channels=1)


def images(problem: PatchEmbedImagesProblem = HEADLINE, sm_count: int | None = None, **config: Any) -> MakePlan:
    return partial(make_plan, problem, Sm90ImagesConfig(**config), sm_count=sm_count)


def strips(problem: PatchEmbedImagesProblem) -> MakePlan:
    """Whatever kernel the problem gets by itself."""
    return partial(checked_plan, problem, Sm90ImagesConfig(), ARCHS["sm_90a"], 132)


def limits() -> Iterator[Limit]:
    yield from _configurations()
    floats = replace(HEADLINE, in_dtype="bfloat16", precision="bf16")
    message = r"^precision = 'bf16':? .*strip's pixels are bytes.*value: 'int8'$"
    yield Limit("strips of floating-point pixels", strips(HEADLINE), strips(floats), message)
    yield from _problems()


def _configurations() -> Iterator[Limit]:
    def field(name: str, legal: Any, illegal: Any, nearest: Any, problem: PatchEmbedImagesProblem = HEADLINE) -> Limit:
        message = rf"^{name} = {illegal!r}: must be.*nearest legal value: {nearest!r}$"
        return Limit(f"{name} {illegal}", images(problem, **{name: legal}), images(problem, **{name: illegal}), message)

    yield field("source", "strips", "gather", "strips")
    yield field("source", "gather", "strips", "split", replace(HEADLINE, channels_last=True))
    yield field("weight", "streamed", "memory", "registers")
    yield field("source", "repack", "strips", "repack", FOURTEEN)
    yield field("weight", "registers", "streamed", "registers", FOURTEEN)
    yield field("stage_blocks", 2, 1, 2, FOURTEEN)
    yield field("tile_patches", 8, 12, 16, FOURTEEN)
    yield field("raw_stages", 2, 1, 2, FOURTEEN)
    yield field("raw_stages", 0, 2, 0)
    message = r"^cluster = 2: .*whole 128 bytes of a strip of 3136; .*value: 1$"
    shares = [images(FOURTEEN, tile_patches=8, tile_images=2, cluster=cluster) for cluster in (1, 2)]
    yield Limit("a cluster's shares of a strip", *shares, message)
    last = replace(HEADLINE, channels_last=True)
    yield field("source", "split", "strips", "split", last)
    shares = [images(last, source="split", stage_blocks=blocks) for blocks in (3, 2)]
    yield Limit("K blocks of split rows", *shares, r"^stage_blocks = 2: must be 3: .*; nearest legal value: 3$")
    yield field("order", "image", "flat", "row")
    yield field("tile_patches", 16, 17, 16)
    yield field("tile_patches", 1, 0, 1)
    for name, most, problem in (("stage_blocks", 2, HEADLINE), ("cluster", 2, HEADLINE), ("warpgroups", 3, GRAY)):
        yield field(name, most, most + 1, most, problem)
        yield field(name, 1, 0, 1, problem)
    yield field("stages", 2, 1, 2)
    # 7 x 28,672 + 1,024 + 2 x 14,336 B are 230,400 of 232,448
    tile = {"tile_patches": 14, "tile_images": 8, "warpgroups": 2, "weight": "registers"}
    rings = [images(HEADLINE, stages=stages, **tile) for stages in (7, 8)]
    yield Limit("stages 8", *rings, r"^stages = 8: must be.*nearest legal value: 7$")
    small = replace(BARE, batch=1, width=32)
    message = r"^stages = 65: .*1,024 B of barriers hold those of 64 stages.*value: 64$"
    rings = [images(small, stages=stages, stage_blocks=1, weight="registers") for stages in (64, 65)]
    yield Limit("barriers of a ring of images", *rings, message)
    clusters = [images(sm_count=sms, cluster=2) for sms in (2, 1)]
    yield Limit("a cluster's multiprocessors", *clusters, r"^sm_count = 1: .*needs 2 multiproc.*value: 2$")
    # A patch's row of 128 bytes is a K block: a stage of one has a single row of every patch.
    long = replace(BARE, patch=128, height=256, width=256)
    message = r"^stage_blocks = 1: .*loads its share of the rows of a stage, or of the images.*value: 2$"
    one = {"cluster": 2, "tile_patches": 16, "tile_images": 1}
    shares = [images(long, stage_blocks=blocks, **one) for blocks in (2, 1)]
    yield Limit("a cluster's shares of a stage", *shares, message)
    message = r"^stages = 3: .*make 277,504 B of shared memory.*value: 2$"
    streamed = {"weight": "streamed", "warpgroups": 3, "tile_patches": 14, "tile_images": 8, "stage_blocks": 2}
    yield Limit("a streamed weight's stages", *(images(stages=i, **streamed) for i in (2, 3)), message)

    def tile(legal: int, illegal: int, message: str, problem: PatchEmbedImagesProblem = GRAY, **config: Any) -> Limit:
        makes = [images(problem, tile_images=n, **config) for n in (legal, illegal)]
        return Limit(f"tile_images {illegal} of {config['tile_patches']} patches", *makes, message)

    yield tile(16, 24, r"^tile_images = 24: .*multiples of 8 up to 16 .*value: 16$", tile_patches=14)
    yield tile(8, 9, r"^tile_images = 9: .*value: 16$", tile_patches=14)
    yield tile(4, -4, r"^tile_images = -4: .*value: 1$", tile_patches=4)
    # 96 registers of weight, 32 for addressing, of 232: 104 of accumulators.
    message = r"^tile_images = 112: .*make 240, the limit with 2 .* is 232.*value: 104$"
    yield tile(104, 112, message, BARE, tile_patches=2, warpgroups=2, weight="registers")
    # Before setmaxnreg a thread of 512 has 128.
    message = r"^tile_images = 104: .*limit with 512 threads is 128.*value: 96$"
    yield tile(96, 104, message, tile_patches=2, warpgroups=3)


def _problems() -> Iterator[Limit]:
    def change(legal: dict[str, Any], illegal: dict[str, Any], message: str, **config: Any) -> Limit:
        makes = [images(replace(HEADLINE, **values), **config) for values in (legal, illegal)]
        return Limit(f"images with {illegal}", *makes, message)

    yield change({"in_dtype": "uint8"}, {"in_dtype": "bfloat16"}, r"^in_dtype = 'bfloat16':? .*value: 'uint8'$")
    yield change({"precision": "int8"}, {"precision": "int4"}, r"^precision = 'int4':? .*int8, bf16, .*: 'int8'$")
    yield change({"out_dtype": "bfloat16"}, {"out_dtype": "float32"}, r"^out_dtype = 'float32':? .*value: 'bfloat16'$")
    message = r"^channels = 9: .*16 pixels and 9 channels is 144 bytes: .* swizzles 128 at most; .*value: 8$"
    yield change({"channels_last": True, "channels": 8}, {"channels_last": True, "channels": 9}, message)
    # 8 pixels of 4 channels are 32 bytes; of 2 they are 16, and 8 rows of these 128.
    small = {"patch": 8, "channels_last": True, "table_rows": 0}
    message = r"^patch = 8: .*8 rows make no whole stages of 256; .*value: 16$"
    yield change(small | {"channels": 4}, small | {"channels": 2}, message)
    yield change({"patch": 16}, {"patch": 7, "table_rows": 0}, r"^patch = 7: .*is 7 bytes: .*multiples of 16.*: 16$")
    narrow = {"patch": 14, "table_rows": 0, "height": 14}
    message = r"^patch = 14: .*row of 126 pixels is not whole multiples of 16 bytes.*value: 16$"
    yield change(narrow | {"width": 112}, narrow | {"width": 126}, message)
    long = {"height": 1152, "width": 1152, "table_rows": 0}
    yield change(long | {"patch": 128}, long | {"patch": 144}, r"^patch = 144: .*is 144 bytes: .*128 at most; .*: 16$")
    yield change({}, {"height": 230}, r"^height = 230: .*whole patches of 16.*value: 224$")
    yield change({}, {"width": 0}, r"^width = 0: .*value: 16$")
    yield change({"batch": 1}, {"batch": 0}, r"^batch = 0: .*value: 1$")
    yield change({"batch": TMA_ROWS}, {"batch": TMA_ROWS + 1}, rf"^batch = .*value: {TMA_ROWS}$")
    yield change({"channels": 1}, {"channels": 0}, r"^channels = 0: .*value: 1$")
    # 32 registers of weight for each channel, 32 for addressing, 7 of accumulators' 16 columns, of 240.
    message = r"^weight = 'registers':? .*224 registers of weight.*value: 'streamed'$"
    yield change({"channels": 6}, {"channels": 7}, message, weight="registers")
    yield change({"n": 776}, {"n": 772}, r"^n = 772: .*multiple of 16 bytes.*value: 776$")
    yield change({"n": 8}, {"n": 0}, r"^n = 0: .*value: 8$")
    yield change({"table_rows": 196}, {"table_rows": 195}, r"^table_rows = 195: must be one of 0, 1, .*value: 196$")
    yield change({"table_rows": 1}, {"table_rows": 2}, r"^table_rows = 2: .*value: 1$")
    # 2^31 / (3 x 224) rows of an image, 2^31 / 196 features.
    tall = {"height": 3_195_648, "table_rows": 0}
    message = r"^height = 3195664: .*strides are 32-bit; nearest legal value: 3195648$"
    yield change(tall, tall | {"height": 3_195_664}, message)
    message = r"^n = 10956552: .*strides are 32-bit; nearest legal value: 10956544$"
    yield change({"n": 10_956_544, "table_rows": 0}, {"n": 10_956_552, "table_rows": 0}, message)
    # 384 padded features x 2 tiles of a grid row x 9 groups of 8 columns for every 16 rows of pixels.
    wide = {"channels": 1, "width": 256, "n": 8}
    legal, illegal = (wide | {"height": 16 * s, "table_rows": 16 * s} for s in (38_836, 38_837))
    config = {"warpgroups": 3, "cluster": 2, "tile_patches": 9, "tile_images": 16}
    yield change(legal, illegal, r"^height = 621392: .*indexed with 32 bits.*value: 621376$", **config)
