"""The kernels whose synchronisation is mutated, each at a size that uses every role and every ring several times."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch

from cute_kernels.config import (
    GemmConfig,
    ImagesConfig,
    PatchEmbedConfig,
    Sm80GemmConfig,
    Sm80ImagesConfig,
    Sm80PatchEmbedConfig,
    Sm90GatherConfig,
    Sm90GemmConfig,
    Sm90ImagesConfig,
    Sm90PatchEmbedConfig,
    Sm100GemmConfig,
    Sm100ImagesConfig,
    Sm100PatchEmbedConfig,
    Sm100ResidentConfig,
)
from cute_kernels.emulator import Options
from cute_kernels.emulator.checking.mutation import target as mutated
from cute_kernels.emulator.checking.mutation.target import Outcome
from cute_kernels.operations.compile import Artifact, compile_plan
from tests.emulator.cases import Case
from tests.emulator.checking.mutation.scaled_kernel import ScaledTarget
from tests.emulator.exact_sums import emulate
from tests.emulator.gather_inputs import make_gather_case
from tests.emulator.gemm_inputs import make_gemm_case
from tests.emulator.image_inputs import PATCH, make_images_case
from tests.emulator.kernel_inputs import make_case
from tests.emulator.mma_sync_inputs import make_image_case, make_rows_case

_SM90 = Sm90PatchEmbedConfig(tile_rows=64, stages=3, stage_blocks=1)
_SM80_GEMM = Sm80GemmConfig(64, 64, stages=3)
FP8 = torch.float8_e4m3fn
_ROWS = {"dtype": torch.int8, "out_dtype": torch.bfloat16, "scales": "row column", "residual": torch.bfloat16}
_TO_FP8 = {"dtype": FP8, "scales": "pointer", "activation": "gelu_tanh"}
"""fc2 and fc1 of an MLP of 8 bits."""


@dataclass(frozen=True)
class KernelTarget:
    """A configuration of the patch-embed kernel and a problem.

    ``k`` is not a multiple of ``stages`` times the K of a stage, so that the same stage holds other blocks in every
    tile. ``quick``: part of the subset for a fast answer.
    """

    config: PatchEmbedConfig
    batch: int
    positions: int
    n: int
    k: int = 768
    quick: bool = False

    def case(self) -> Case:
        """Inputs on one cluster, and an output of its own that is poisoned anew at every call."""
        return _inputs(self).fresh()

    @functools.cached_property
    def artifact(self) -> Artifact:
        return compile_plan(self.case().plan, emulated=True)

    @property
    def ptx(self) -> str:
        return self.artifact.ptx

    def run(self, ptx: str, options: Options, repeat: int = 1) -> Outcome:
        case = self.case()
        artifact = dataclasses.replace(self.artifact, ptx=ptx)
        report = emulate(case.plan, case.tensors, options, artifact=artifact, repeat=repeat)
        wrong = case.mismatches()
        difference = f"{int(wrong.sum())} of {wrong.numel()} elements differ" if wrong.any() else ""
        return Outcome(report.warp_instructions, difference)


@functools.lru_cache(maxsize=16)
def _inputs(target: KernelTarget) -> Case:
    """Once per target: the reference takes longer than the emulation."""
    config = target.config
    cluster = config.cluster if isinstance(config, Sm90PatchEmbedConfig) else config.cta_group
    sizes = {"batch": target.batch, "positions": target.positions, "n": target.n, "k": target.k}
    return make_case(**sizes, config=target.config, sm_count=cluster, seed=5)


@dataclass(frozen=True)
class GemmTarget(KernelTarget):
    """A configuration of the dense GEMM and a problem of ``batch * positions`` rows; ``bias`` is present.

    ``out_dtype``: None: ``dtype``. ``scales``: as of `make_gemm_case`.
    """

    config: GemmConfig
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    scales: str = ""
    activation: str = "none"
    residual: torch.dtype | None = None
    arch: str | None = None

    def case(self) -> Case:
        return _gemm_inputs(self).fresh()


@functools.lru_cache(maxsize=16)
def _gemm_inputs(target: GemmTarget) -> Case:
    config = target.config
    sm_count = getattr(config, "cluster_m", 1) * getattr(config, "cluster_n", 1) * getattr(config, "split_k", 1)
    out_dtype = target.out_dtype or target.dtype
    return make_gemm_case(
        m=target.batch * target.positions, n=target.n, k=target.k, in_dtype=target.dtype, out_dtype=out_dtype,
        scales=target.scales, activation=target.activation, residual=target.residual,
        out_scale=0.05 if out_dtype is FP8 else None, config=config, arch=target.arch, sm_count=sm_count, seed=5,
    )  # fmt: skip


@dataclass(frozen=True)
class ImagesTarget(KernelTarget):
    """A configuration of a kernel over images, grid rows of one tile, ``k`` pixels of a patch in all channels.

    ``layout`` is the side of a patch, and whether the channels are last.
    """

    config: ImagesConfig
    layout: tuple[int, bool] = (PATCH, False)

    def case(self) -> Case:
        return _images_inputs(self).fresh()


@functools.lru_cache(maxsize=16)
def _images_inputs(target: ImagesTarget) -> Case:
    config = target.config
    patch, channels_last = target.layout
    return make_images_case(
        batch=target.batch, channels=target.k // patch**2, n=target.n, config=config, sm_count=_ctas(config), seed=5,
        grid=(target.positions // config.tile_patches, config.tile_patches), patch=patch,
        channels_last=channels_last,
    )  # fmt: skip


def _ctas(config: ImagesConfig) -> int:
    """Of a cluster."""
    return config.cta_group if isinstance(config, Sm100ImagesConfig) else config.cluster


@dataclass(frozen=True)
class GatherTarget(KernelTarget):
    """A configuration of a kernel over 16-bit images, grid rows of one tile, ``k`` pixels in all channels."""

    config: Sm90GatherConfig | Sm100ImagesConfig

    def case(self) -> Case:
        return _gather_inputs(self).fresh()


@functools.lru_cache(maxsize=16)
def _gather_inputs(target: GatherTarget) -> Case:
    config = target.config
    return make_gather_case(
        batch=target.batch, channels=target.k // PATCH**2, n=target.n, config=config, sm_count=_ctas(config), seed=5,
        grid=(target.positions // config.tile_patches, config.tile_patches),
        arch="sm_100a" if isinstance(config, Sm100ImagesConfig) else "sm_90a",
    )  # fmt: skip


@dataclass(frozen=True)
class MmaSyncTarget(KernelTarget):
    """A configuration of a patch embed by ``mma.sync``, of rows of int8 or of images with one row of patches."""

    config: Sm80PatchEmbedConfig | Sm80ImagesConfig

    def case(self) -> Case:
        return _mma_sync_inputs(self).fresh()


@functools.lru_cache(maxsize=16)
def _mma_sync_inputs(target: MmaSyncTarget) -> Case:
    facts = {"n": target.n, "config": target.config, "sm_count": 1, "seed": 5}
    if isinstance(target.config, Sm80PatchEmbedConfig):
        return make_rows_case("int8", m=target.batch * target.positions, k=target.k, **facts)
    grid, channels = (1, target.positions), target.k // PATCH**2
    return make_image_case("int8", batch=target.batch, grid=grid, channels=channels, **facts)


TARGETS: dict[str, KernelTarget] = {
    "sm100": KernelTarget(Sm100PatchEmbedConfig(), 12, 128, 256, quick=True),
    "sm100-4-warps": KernelTarget(Sm100PatchEmbedConfig(tile_n=128, stages=3, epilogue_warps=4), 12, 128, 128),
    "sm100-wide-loads": KernelTarget(Sm100PatchEmbedConfig(128, 5, 5, 64, "bf16x2"), 14, 100, 128, k=400),
    "sm100-one-cta": KernelTarget(
        Sm100PatchEmbedConfig(tile_n=128, stages=3, tmem_load_width=16, cta_group=1, store_buffers=2),
        4, 128, 128, k=400,
    ),
    "sm100-on-chip": KernelTarget(
        Sm100ResidentConfig(
            weight="tmem", order="position", tile_rows=64, tile_positions=1, cta_group=2, accumulators=1,
            mma_columns=32, stages=4,
        ),
        80, 4, 256, k=320,
    ),
    "sm100-on-chip-one-cta": KernelTarget(
        Sm100ResidentConfig(
            weight="smem", order="flat", tile_rows=32, tile_positions=1, cta_group=1, accumulators=2, stages=4
        ),
        40, 4, 128, k=320,
    ),
    "sm90-registers": KernelTarget(_SM90, 64, 4, 256, quick=True),
    "sm90-streamed": KernelTarget(dataclasses.replace(_SM90, weight="streamed"), 64, 4, 256),
    "sm90-flat": KernelTarget(dataclasses.replace(_SM90, order="flat", stage_blocks=2), 64, 4, 256),
    "sm90-one-cta": KernelTarget(dataclasses.replace(_SM90, cluster=1, pingpong=False, weight="streamed"), 64, 4, 128),
    "sm90-three-warpgroups": KernelTarget(
        dataclasses.replace(_SM90, warpgroups=3, tile_rows=32, stages=8), 64, 4, 384, k=640
    ),
    "images-sm90": ImagesTarget(
        Sm90ImagesConfig(
            tile_patches=4, tile_images=4, warpgroups=2, cluster=2, stages=3, stage_blocks=1, weight="registers"
        ),
        12, 8, 256, k=256,
    ),
    "images-sm90-channels-last": ImagesTarget(
        Sm90ImagesConfig(
            tile_patches=4, tile_images=4, warpgroups=1, cluster=2, stages=3, stage_blocks=1, weight="streamed"
        ),
        12, 8, 128, k=768, layout=(16, True),
    ),
    "images-sm90-split": ImagesTarget(
        Sm90ImagesConfig(
            source="split", tile_patches=4, tile_images=4, warpgroups=1, cluster=2, stages=2, stage_blocks=3,
            weight="streamed",
        ),
        12, 8, 128, k=768, layout=(16, True),
    ),
    "images-sm90-repack": ImagesTarget(
        Sm90ImagesConfig(tile_patches=8, tile_images=8, warpgroups=2, cluster=2, stages=2, stage_blocks=2),
        12, 16, 256, k=196, layout=(14, False),
    ),
    "images-sm100": ImagesTarget(
        Sm100ImagesConfig(
            tile_patches=4, tile_images=16, cta_group=2, weight="tmem", accumulators=1, mma_columns=32, stages=3,
            stage_blocks=1,
        ),
        40, 8, 256, k=256,
    ),
    "images-sm100-one-cta": ImagesTarget(
        Sm100ImagesConfig(
            tile_patches=4, tile_images=8, cta_group=1, weight="smem", accumulators=2, stages=3, stage_blocks=1
        ),
        40, 8, 128, k=256,
    ),
    "gather-sm100": GatherTarget(
        Sm100ImagesConfig(tile_patches=4, tile_images=8, cta_group=2, stages=3, stage_blocks=1), 40, 8, 256, k=256
    ),
    "gather-sm90": GatherTarget(Sm90GatherConfig(2, 1, 64, 2, 64, 2, stages=3, pingpong=True), 64, 8, 128, k=256),
    "gemm-sm100-level-7": GemmTarget(Sm100GemmConfig(256, stages=2), 8, 128, 256, k=320),
    "gemm-sm100-two-pairs": GemmTarget(
        Sm100GemmConfig(256, 64, stages=2, store_stages=1, cluster_m=4, accumulators=1), 8, 128, 256, k=320
    ),
    "gemm-sm90-pingpong": GemmTarget(Sm90GemmConfig(64, 128, 3, 2, 1, True), 4, 128, 256, k=320),
    "gemm-sm100-fp8": GemmTarget(
        Sm100GemmConfig(128, 128, stages=2, store_stages=1), 8, 128, 128, k=336, **_ROWS | {"dtype": FP8}
    ),
    "gemm-sm100-to-fp8": GemmTarget(Sm100GemmConfig(256, stages=2, store_stages=1), 8, 128, 256, k=336, **_TO_FP8),
    "gemm-sm90-transposed": GemmTarget(
        Sm90GemmConfig(64, 96, 3, 2, 1, True, 1, transposed=True), 3, 128, 256, k=320, residual=torch.bfloat16
    ),
    "gemm-sm90-int8": GemmTarget(Sm90GemmConfig(64, 128, 3, 2, 1, True), 4, 128, 256, k=608, **_ROWS),
    "gemm-sm90-to-fp8": GemmTarget(Sm90GemmConfig(64, 128, 3, 2, 1, True, 1), 4, 128, 256, k=608, **_TO_FP8),
    "gemm-sm80-int8": GemmTarget(_SM80_GEMM, 2, 64, 128, k=320, **_ROWS),
    "gemm-sm80-to-fp8": GemmTarget(_SM80_GEMM, 2, 64, 128, k=320, **_TO_FP8, arch="sm_89"),
    "gemm-sm80": GemmTarget(_SM80_GEMM, 2, 64, 128, k=160, quick=True),
    "gemm-sm80-tf32": GemmTarget(_SM80_GEMM, 2, 64, 64, k=80, dtype=torch.float32),
    "gemm-sm80-short": GemmTarget(dataclasses.replace(_SM80_GEMM, stages=4), 2, 64, 64, k=64),
    "gemm-sm80-split": GemmTarget(dataclasses.replace(_SM80_GEMM, row_bytes=128, split_k=2), 2, 64, 64, k=464),
    "rows-sm80": MmaSyncTarget(Sm80PatchEmbedConfig(64, 64, stages=3), 2, 64, 128, k=320),
    "images-sm80": MmaSyncTarget(Sm80ImagesConfig(64, 64, stages=3), 16, 8, 64, k=512),
    "images-sm80-teams": MmaSyncTarget(Sm80ImagesConfig(64, 64, stages=3, teams=2), 16, 16, 64, k=512),
    "block-scaled": ScaledTarget(),
    "gemm-sm90-split": GemmTarget(Sm90GemmConfig(128, 64, 3, 1, 1, store_stages=1, split_k=2), 2, 128, 64, k=320),
}

SCHEDULES = {name: dataclasses.replace(options, strict=True) for name, options in mutated.SCHEDULES.items()}
"""As mutants of our kernels are judged: strictly."""

ROLE_FILES = (
    "/load.py", "/strips.py", "/cta_pair.py", "/transposed.py", "/gemm.py", "/gemm_mma.py", "/patch_embed.py",
    "/patch_embed_images.py", "/patch_embed_resident.py", "/gather.py",
)  # fmt: skip
"""Ends of the names of files with the code of warp roles."""
