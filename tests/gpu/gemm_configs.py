"""What the tests of the dense GEMM run on each architecture. `CONFIGS` are those of the device at hand."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable

from cute_kernels.config import GemmConfig, GemmProblem, Sm90GemmConfig, Sm100GemmConfig
from cute_kernels.plan import ARCHS, make_plan
from cute_kernels.plan import gemm_sm90 as sm90_gemm
from cute_kernels.plan import gemm_sm100 as sm100_gemm
from tests.gpu import architecture

CANDIDATES = [
    plan.config
    for plan in sm90_gemm.candidates(
        GemmProblem(4096, 4096, 4096, bias=True, row_scale=True, column_scale=True), ARCHS["sm_90a"], 132
    )
]

SM90 = (
    *(c for c in CANDIDATES if c.split_k == 1 and not c.transposed and c.store_stages < 10),
    Sm90GemmConfig(128, 256, 3, 1, 2),
    Sm90GemmConfig(128, 128, 4, 2, 2),
    Sm90GemmConfig(128, 128, 2, 1, 1),
    Sm90GemmConfig(256, 128, 4, 1, 2),
    Sm90GemmConfig(256, 192, 3, 2, 1, store_stages=1),
    Sm90GemmConfig(128, 128, 5, 2, 2, pingpong=True, group_m=1),
    Sm90GemmConfig(64, 64, 8, 1, 1, pingpong=True, store_stages=1, group_m=3),
    Sm90GemmConfig(192, 128, 4, 2, 1, pingpong=True),
    Sm90GemmConfig(64, 192, 5, 1, 2, pingpong=True, store_stages=3),
    Sm90GemmConfig(64, 128, 7, 4, 1, pingpong=True),
    Sm90GemmConfig(128, 64, 8, 2, 4, store_stages=1),
)

TRANSPOSED = (
    *(config for config in CANDIDATES if config.transposed),
    Sm90GemmConfig(256, 112, 4, 1, 2, store_stages=2, transposed=True),
    Sm90GemmConfig(64, 96, 6, 2, 2, pingpong=True, store_stages=2, transposed=True),
    Sm90GemmConfig(64, 32, 8, 1, 1, store_stages=1, split_k=4, transposed=True),
)
"""For outputs of 16 bits, which only the SM90 kernel does."""

SPLIT = (
    Sm90GemmConfig(64, 64, 6, 1, 1, store_stages=1, split_k=2),
    Sm90GemmConfig(128, 64, 5, 1, 1, store_stages=1, split_k=2),
    Sm90GemmConfig(128, 128, 3, 2, 1, split_k=2),
    Sm90GemmConfig(128, 128, 4, 1, 2, store_stages=1, split_k=4),
    Sm90GemmConfig(128, 64, 7, 1, 1, store_stages=1, split_k=8),
    Sm90GemmConfig(256, 128, 2, 1, 1, store_stages=2, split_k=2),
)
"""K split among the CTAs of a cluster, which only the SM90 kernel does."""


def _sm100_tiles() -> Iterable[Sm100GemmConfig]:
    """Every tile, cluster and number of accumulators; those of four times 256 columns do not fit tensor memory."""
    shapes = itertools.product((128, 256), (64, 128, 256), (2, 4), (1, 2), (1, 2))
    for block_m, tile_n, cluster_m, cluster_n, accumulators in shapes:
        if block_m // 128 * tile_n * accumulators <= 512:
            group_m = 3 if accumulators == 1 else 8
            yield Sm100GemmConfig(block_m, tile_n, 4, 1, group_m, cluster_m, cluster_n, accumulators)


SM100 = (
    *sm100_gemm.CANDIDATES,
    sm100_gemm.ONE_ACCUMULATOR,
    dataclasses.replace(sm100_gemm.WIDE, cluster_m=4),
    dataclasses.replace(sm100_gemm.WIDE, cluster_n=2),
    Sm100GemmConfig(tile_n=64, stages=3, store_stages=1, cluster_m=4, cluster_n=2),
    Sm100GemmConfig(tile_n=256, stages=5, store_stages=4),
    Sm100GemmConfig(tile_n=64, stages=3, store_stages=1),
    dataclasses.replace(sm100_gemm.WIDE, group_m=1),
    dataclasses.replace(sm100_gemm.ONE_ACCUMULATOR, group_m=1),
    *_sm100_tiles(),
)

SELECTIONS: dict[str, tuple[GemmConfig, ...]] = {"sm_90a": SM90, "sm_100a": SM100}
CONFIGS = SELECTIONS[architecture.at_hand() or "sm_90a"]
HALF_CONFIGS = CONFIGS + (TRANSPOSED if CONFIGS is SM90 else ())
"""Configurations for outputs of 16 bits."""
NARROW = {
    "sm_90a": (Sm90GemmConfig(128, 160, 4, 1, 1, True, 10),),
    "sm_100a": (Sm100GemmConfig(tile_n=64, stages=3, store_stages=1),),
}[architecture.at_hand() or "sm_90a"]
"""For results of 8 bits: on SM90 with a store buffer for every region of a tile, which others have no room for."""


def with_stages_that_fit(problem: GemmProblem, config: GemmConfig | None, arch: str | None = None) -> GemmConfig | None:
    """A configuration for BF16 results beside store buffers of other ones, which may be larger; a residual has fewer of
    them."""
    if config is None:
        return None
    for stores, count in itertools.product((config.store_stages, 1), range(config.stages, 1, -1)):
        changed = dataclasses.replace(config, stages=count, store_stages=stores)
        with contextlib.suppress(ValueError):
            make_plan(problem, changed, arch)
            return changed
    return config  # whose refusal the test is to see


def name(config: GemmConfig | None) -> str:
    return "default" if config is None else "-".join(str(int(value)) for value in dataclasses.astuple(config))
