"""Limits of the kernels of ``mma.sync``: at the limit and one unit beyond."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from cute_kernels.config import (
    GemmProblem,
    PatchEmbedImagesProblem,
    PatchEmbedProblem,
    Sm80GemmConfig,
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
)
from cute_kernels.plan import make_plan
from tests.plan.limits import Limit

GEMM, ROWS = GemmProblem(4096, 4096, 4096), PatchEmbedProblem(4096, 768, 768, 196, "uint8")
IMAGES = PatchEmbedImagesProblem(64, 3, 224, 224, 16, 768, table_rows=196)
CONFIGS = {
    GemmProblem: Sm80GemmConfig, PatchEmbedProblem: Sm80PatchEmbedConfig, PatchEmbedImagesProblem: Sm80ImagesConfig
}  # fmt: skip


def _limit(
    message: str, problem: Any, at: dict[str, Any], beyond: dict[str, Any], arch: str = "sm_80", sm_count: Any = None
) -> Limit:
    """Configurations, or with other fields problems, that are legal and not."""

    def plan(changes: dict[str, Any]) -> Any:
        of_problem = {name: value for name, value in changes.items() if hasattr(problem, name)}
        others = {name: value for name, value in changes.items() if name not in of_problem}
        count = others.pop("sm_count", sm_count)
        target = others.pop("arch", arch)
        return make_plan(replace(problem, **of_problem), CONFIGS[type(problem)](**others), target, sm_count=count)

    return Limit(f"{type(problem).__name__} by mma.sync: {message}", partial(plan, at), partial(plan, beyond), message)


def limits() -> Iterator[Limit]:
    """All of them."""
    yield from _of_tiles()
    yield from _of_operations()


def _of_tiles() -> Iterator[Limit]:
    yield _limit("^row_bytes = 96: .*value: 64$", GEMM, {"row_bytes": 128}, {"row_bytes": 96})
    yield _limit("^warps_m = 3:? ", GEMM, {"warps_m": 4}, {"warps_m": 3})
    yield _limit("^warps_n = 16:.*128 or 256 threads", GEMM, {"warps_m": 4}, {"warps_m": 4, "warps_n": 4})
    yield _limit("^tile_m = 96:? ", GEMM, {"tile_m": 64}, {"tile_m": 96})
    yield _limit("^tile_n = 32:? ", GEMM, {"tile_n": 64}, {"tile_n": 32})
    narrow = {"warps_m": 1, "warps_n": 4}
    yield _limit("^tile_n = 64: .*multiples of 32 each", GEMM, narrow | {"tile_m": 64}, narrow | {"tile_n": 64})
    # 256 threads copy 64 rows of four pieces at a time.
    wide = {"tile_n": 128, "warps_n": 4}
    yield _limit("^tile_m = 32: .*64 rows of 64 bytes", GEMM, wide | {"tile_m": 64}, wide | {"tile_m": 32})
    # 64 x 128 sums of 32 lanes are 256 each.
    yield _limit("^tile_n = 256: .*value: 128$", GEMM, {"tile_n": 128}, {"tile_n": 256, "stages": 2})
    yield _limit("^stages = 1:? ", GEMM, {"stages": 2}, {"stages": 1})
    small = {"tile_m": 64, "tile_n": 64}
    yield _limit("^stages = 9:? ", GEMM, small | {"stages": 8}, small | {"stages": 9})
    # 16,384 B a stage: six fit 101,376 B, ten 166,912 B.
    for arch in ("sm_86", "sm_89", "sm_120"):
        yield _limit(r"^stages = 7: .*limit is 101,376 B; .*value: 6$", GEMM, {"stages": 6}, {"stages": 7}, arch)
    large = {"tile_n": 256, "warps_n": 4}
    yield _limit(r"^stages = 7: .*limit is 166,912 B", GEMM, large | {"stages": 6}, large | {"stages": 7})
    # Of 100 KiB three times 32 KiB and 1 KiB of the system's; of 65,536 registers twice 128 x (128 + 40) and once more.
    two = {"stages": 3, "resident_ctas": 2}
    yield _limit("^resident_ctas = 2: .*fit a multiprocessor once", GEMM, two, two | {"stages": 4}, "sm_86")
    three = {"stages": 2, "resident_ctas": 3}
    yield _limit("^resident_ctas = 4: .*3 times", GEMM, three, three | {"resident_ctas": 4})
    yield _limit("^k = .*offsets in a row are 32-bit", GEMM, {"k": 2**30 - 512}, {"k": 2**30 - 504})
    # 2^16 tiles along either side are too many.
    many = {"m": 2**23 - 128, "n": 2**22}
    yield _limit("^tile_m = 128: .*tile numbers are 32-bit", GEMM, many, many | {"m": 2**23 + 128})


def _of_operations() -> Iterator[Limit]:
    for problem in (GEMM, ROWS, IMAGES):
        yield _limit("^sm_count = 0:? ", problem, {"sm_count": 1}, {"sm_count": 0})
    yield _limit("^rounding = 'up':? ", GEMM, {"rounding": "nearest_a"}, {"rounding": "up"})
    yield _limit("^group_m = 0:? ", GEMM, {"group_m": 1}, {"group_m": 0})
    yield _limit("^group_m = 1025:? ", GEMM, {"group_m": 1024}, {"group_m": 1025})
    split = {"row_bytes": 128, "split_k": 8}
    yield _limit("^split_k = 3:? ", GEMM, split, split | {"split_k": 3})
    yield _limit("^row_bytes = 64: .*blocks of 128 bytes", GEMM, split, split | {"row_bytes": 64})
    # Of BF16 512 elements are 8 blocks, one less 7.
    few = split | {"m": 64, "stages": 2}
    yield _limit("^split_k = 8: .*parts of 7 blocks.*value: 4$", GEMM, few | {"k": 456}, few | {"k": 448})
    many = split | {"m": 128, "stages": 2}
    yield _limit("^split_k = 8: .*4097 tiles, 4096 may", GEMM, many | {"n": 2**19}, many | {"n": 2**19 + 8})
    fp8 = {"in_dtype": "float8_e4m3fn"}
    for arch in ("sm_80", "sm_86", "sm_90"):
        yield _limit("^in_dtype = .*E4M3 on sm_89 and sm_120", ROWS, fp8 | {"arch": "sm_89"}, fp8, arch)
    bare = replace(IMAGES, height=192, width=192, table_rows=0)
    yield _limit("^patch = 24: .*pieces of 16", bare, {"patch": 32}, {"patch": 24})
    yield _limit("^channels_last = True:", IMAGES, {}, {"channels_last": True})
    # 257 channels of 16 x 16 pixels: 65,792 x 255 x 128 is less than 2^31.
    yield _limit("^channels = 258: .*value: 257$", IMAGES, {"channels": 257}, {"channels": 258})
    yield _limit("^tile_images = 4:? ", IMAGES, {"tile_images": 1}, {"tile_images": 4})
    teams = {"tile_m": 64, "tile_n": 128, "row_bytes": 64}
    yield _limit("^teams = 3:? ", IMAGES, teams | {"teams": 2}, teams | {"teams": 3})
    # 128 features of 768 bytes and twice four stages of 4 KiB fit 166,912 B, 192 features do not.
    wide = {"tile_n": 256, "warps_m": 1, "warps_n": 4}
    yield _limit(
        r"^teams = 2: .*196,608 B of the weight and 2 x 16,384 B.*limit is 166,912 B; .*value: 1$", IMAGES,
        teams | {"teams": 2}, teams | wide | {"teams": 2},
    )
    short = teams | {"teams": 2}
    yield _limit("^stages = 6: .*value: 5$", replace(IMAGES, channels=1), short | {"stages": 5}, short | {"stages": 6})
    yield _limit("^warps_n = 16:.*128 or 256 threads", IMAGES, teams | {"teams": 2}, teams | {"warps_n": 4, "teams": 2})
    tall = {"warps_m": 4, "warps_n": 2}
    yield _limit("^tile_m = 192: .*threads copy", IMAGES, tall | {"tile_m": 128}, tall | {"tile_m": 192})
    # 196 positions of whole tiles of 128 rows.
    yield _limit("^batch = .*numbered with 32 bits", IMAGES, {"batch": 2**31 // 196 - 16}, {"batch": 2**31 // 196 + 8})
