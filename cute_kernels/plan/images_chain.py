"""Plan of two kernels in turn: a pass that lays out images as rows of patches, and the patch embed of rows.

For images whose patches TMA cannot read as operands, and on SM90 where it takes less modelled time. The second kernel
is launched as the first one's dependent (programmatic dependent launch), so that it sets itself up while the pass runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from cute_kernels.common.facts import fact, text
from cute_kernels.config import PatchEmbedConfig, PatchEmbedImagesProblem, PatchEmbedProblem
from cute_kernels.plan import patch_embed_sm90
from cute_kernels.plan.base import VECTOR_BYTES, Arch, Kernel, Plan, Prediction
from cute_kernels.plan.images import PIXEL_TYPES, STRIP_PATCH, describe_problem
from cute_kernels.plan.images_gather import why_not_gathered
from cute_kernels.plan.images_sm80 import copies_rows
from cute_kernels.plan.images_strips import why_no_operand
from cute_kernels.plan.patch_embed import PatchEmbedPlan, check_problem
from cute_kernels.plan.patches_sm90 import Work
from cute_kernels.plan.patchify import PatchifyPlan, PatchifyProblem, plan_patchify

MOST_FLOAT_CHANNELS = 3
"""Channels of 16-bit images: 128 of 512 columns of tensor memory for each one's weight, 16 or more for accumulators."""

COPIED_TOGETHER = 16
"""Images of one patch each that one CTA copies, at most: with a CTA for each, 32,768 of 1,176 bytes took seven times as
long (H100)."""

LONGEST_COPIED = 3072
"""Pixels of images that are copied together: 16 of four bytes each fit shared memory."""

MOST_TRIED = 8
"""Configurations of the kernel over rows that a tuner times behind a pass."""

Reason = Callable[[PatchEmbedImagesProblem], str]

_CHOSEN = "by the model of time it takes less, or the configuration is that of a kernel over rows"


def why_rows_on_sm90(problem: PatchEmbedImagesProblem) -> str:
    """Why these images are not read by a kernel of SM90a itself; empty where one can."""
    return why_no_operand(problem) if problem.precision == "int8" else why_not_gathered(problem)


def why_not_read_on_sm90(problem: PatchEmbedImagesProblem) -> str:
    """Why the kernel over uint8 images does not take a problem; empty where it does."""
    return why_no_operand(problem) if problem.precision == "int8" else "weights are floating-point numbers"


def why_rows_on_sm100(problem: PatchEmbedImagesProblem) -> str:
    """Why a pass is needed in front of the kernel over rows on SM100a; "" if it is not."""
    if problem.precision == "int8":
        return _why_no_strips(problem)
    if problem.patch != STRIP_PATCH:
        return f"a row of {problem.patch} pixels of 16 bits is not the 32 bytes of one MMA step"
    if problem.channels > MOST_FLOAT_CHANNELS:
        return f"the weight of {problem.channels} channels of 16 bits leaves no room in tensor memory"
    return ""


def why_rows_on_sm80(problem: PatchEmbedImagesProblem) -> str:
    """Why the kernel of ``mma.sync`` does not read these images itself; empty where it does."""
    if problem.channels_last:
        return "channels are last, and copies are made of neighbouring pixels of one channel"
    if not copies_rows(problem):
        return f"a row of {problem.patch} pixels of a patch is not the 16, 32 or 64 bytes that are copied at once"
    return ""


def _why_no_strips(problem: PatchEmbedImagesProblem) -> str:
    if problem.channels_last:
        return "channels are last, and strips are made of neighbouring pixels of one channel"
    if problem.patch != STRIP_PATCH:
        return f"a row of {problem.patch} pixels of a patch is not the {STRIP_PATCH} bytes that strips are made of"
    return ""


@dataclass(frozen=True)
class RowsChainPlan(Plan):
    """A pass over the images, then the patch embed of the rows that it writes, whose plan is ``rows``; ``reason``: why
    there are two.

    Rows count the pixels of a patch by (channel, row, column); where the channels are last by (row, column, channel),
    as the images do, and the weight likewise. They are zero-padded to `cute_kernels.plan.patchify.ROW_BYTES`.
    """

    operation: ClassVar[str] = "patch_embed_images"

    problem: PatchEmbedImagesProblem
    config: PatchEmbedConfig
    rows: PatchEmbedPlan
    reason: str

    @cached_property
    def patchify(self) -> PatchifyPlan:
        """The first kernel."""
        return plan_patchify(_pass_of(self.problem), self.arch)

    order = text(lambda self: "hwc" if self.problem.channels_last else "chw")
    """Order of a patch's pixels in its row."""
    runs = text(lambda self: f"patchify, then patch_embed: {self.reason}")
    launches = fact(lambda self: (self.patchify, self.rows))
    scratch = fact(lambda self: ("x",))
    operands = fact(lambda self: (self.patchify.operands[0], *self.rows.operands))
    """Operands that the pass reads, and all of the second kernel: ``x`` [B * S, K] lies between."""
    table_shape = fact(lambda self: self.rows.table_shape)
    """Shape of the table as the second kernel reads it."""

    def describe_problem(self) -> str:
        return describe_problem(self.problem)

    def describe(self) -> list[tuple[str, str]]:
        first, second = (part.describe_problem() for part in self.launches)
        return [
            ("problem", self.describe_problem()),
            ("architecture", f"{self.arch.name}, {self.sm_count} SMs"),
            ("source", f"rows of patches, made by a pass in front: {self.reason}"),
            ("kernel 1, patchify", first),
            ("kernel 2, patch_embed", f"{second}, chained by programmatic dependent launch"),
            ("memory between them", f"{self.rows.problem.m * self.patchify.vectors * VECTOR_BYTES:,} B of rows"),
            *((f"{part.operation}: {what}", row) for part in self.launches for what, row in part.describe()[2:]),
        ]


def _pass_of(p: PatchEmbedImagesProblem) -> PatchifyProblem:
    if p.positions == 1:
        return _copy_of(p)
    return PatchifyProblem(
        batch=p.batch, channels=p.channels, height=p.height, width=p.width, patch=p.patch, in_dtype=p.in_dtype,
        out_dtype=PIXEL_TYPES[p.precision], channels_last=p.channels_last, order="hwc" if p.channels_last else "chw"
    )


def _copy_of(p: PatchEmbedImagesProblem) -> PatchifyProblem:
    """Images of one patch each are rows already, which only become longer: pixels of as many channels as a row has."""
    channels = p.channels * p.patch**2
    together = math.gcd(p.batch, COPIED_TOGETHER) if channels <= LONGEST_COPIED else 1
    return PatchifyProblem(
        batch=p.batch // together, channels=channels, height=1, width=together, patch=1, in_dtype=p.in_dtype,
        out_dtype=PIXEL_TYPES[p.precision], channels_last=True, order="hwc"
    )


def rows_problem(problem: PatchEmbedImagesProblem, arch: Arch) -> PatchEmbedProblem:
    """Problem of the second kernel, over the rows that the pass writes. Raises ValueError: no pass or no kernel over
    rows takes these images."""
    first = plan_patchify(_pass_of(problem), arch)
    product = PatchEmbedProblem(
        m=problem.batch * problem.positions, n=problem.n, k=first.row_elements, table_rows=problem.table_rows,
        in_dtype=PIXEL_TYPES[problem.precision], out_dtype=problem.out_dtype, feature_scale=problem.precision == "int8"
    )
    check_problem(product)
    return product


def chained(rows: Kernel, why: Reason, predict: Callable[[RowsChainPlan], Prediction] | None = None) -> Kernel:
    """A kernel over rows behind the pass, with its tunables; ``why`` is empty where a kernel can read the images."""

    def plan(problem: PatchEmbedImagesProblem, config: PatchEmbedConfig, arch: Arch, sm_count: int) -> RowsChainPlan:
        product = rows.plan(rows_problem(problem, arch), config, arch, sm_count)
        return RowsChainPlan(problem, product.config, arch, sm_count, product, why(problem) or _CHOSEN)

    def choose(problem: PatchEmbedImagesProblem, arch: Arch, sm_count: int) -> PatchEmbedConfig:
        return rows.choose(rows_problem(problem, arch), arch, sm_count)

    def takes(problem: PatchEmbedImagesProblem, arch: Arch) -> str:
        try:
            return rows.takes(rows_problem(problem, arch), arch)
        except ValueError as error:
            return str(error)

    def search(problem: PatchEmbedImagesProblem, arch: Arch, sm_count: int) -> list[RowsChainPlan]:
        try:
            products = rows.search(rows_problem(problem, arch), arch, sm_count)
        except ValueError:
            return []
        return [plan(problem, product.config, arch, sm_count) for product in products[:MOST_TRIED]]

    return Kernel(rows.config, plan, rows.fields, choose, search, takes, predict)


def work_on_sm90(plan: RowsChainPlan) -> Work:
    """The work of both kernels of SM90a, for the model of their time."""
    rows, p = patch_embed_sm90.work(plan.rows), plan.problem
    pixels = math.prod((p.batch, p.channels, p.height, p.width)) * plan.patchify.in_bytes
    written = plan.rows.problem.m * plan.patchify.vectors * VECTOR_BYTES
    return rows._replace(once=(*rows.once[:-1], 1), passed=pixels + written)
