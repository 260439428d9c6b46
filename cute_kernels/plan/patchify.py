"""Plan of the pass that lays out images as rows of patches: widths of loads and stores, shared memory of a CTA."""

import functools
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cute_kernels.common.facts import fact, flag, number
from cute_kernels.config import LAUNCH_ARGUMENT, PatchEmbedImagesProblem, Typed
from cute_kernels.plan import base

PatchOrder = Literal["chw", "hwc"]

PIXEL_TYPES = ("uint8", "bfloat16", "float16", "float32")
CONVERSIONS = {
    "uint8": ("uint8", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("bfloat16", "float16"),
    "float32": ("bfloat16", "float16"),
}
"""Element types of the rows by those of the pixels; each conversion rounds to nearest, ties to even."""

PITCH_PAD_BYTES = 40
"""Between rows of pixels in shared memory, an odd multiple of 8 bytes. Two to three of
the 32 places from which a warp gathers share a bank then (224 and 336 pixels, p = 14), without it four to five."""

ROW_BYTES = 32
"""Rows begin on multiples of these, with zeros between them, so that they share no sector of L2: 0.92 to 0.95 of the
time of rows of 592 bytes that do; on 128 bytes they were not faster (bench/results)."""

WORD_BYTES = 4
"""Least bytes that a thread stores: 32 of them are a whole line, and neighbours meet no bank twice."""


@dataclass(frozen=True)
class PatchifyProblem(Typed):
    """Images ``[batch, channels, height, width]``, of whole patches, -> rows ``[batch * positions, row_elements]``,
    whose pixels are in this ``order``. ``channels_last``: memory order of the images: (row, column, channel) instead
    of (channel, row, column)."""

    batch: int = field(metadata=LAUNCH_ARGUMENT)
    channels: int
    height: int = field(metadata=LAUNCH_ARGUMENT)
    width: int = field(metadata=LAUNCH_ARGUMENT)
    patch: int
    in_dtype: str = "uint8"
    out_dtype: str = "uint8"
    channels_last: bool = False
    order: PatchOrder = "chw"

    positions = number(lambda self: self.height // self.patch * (self.width // self.patch))


def describe_images(p: PatchifyProblem | PatchEmbedImagesProblem) -> str:
    """Shape, element type and layout of images."""
    layout = "NHWC" if p.channels_last else "NCHW"
    return f"[{p.batch}, {p.channels}, {p.height}, {p.width}] {p.in_dtype} {layout}"


@dataclass(frozen=True)
class PatchifyPlan(base.Plan):
    """A legal way to run one pass; construct it with `plan_patchify`. ``threads``: of a CTA."""

    operation: ClassVar[str] = "patchify"
    kernel: ClassVar[str] = "cute_kernels.kernels.patchify:PatchifyKernel"
    graph: ClassVar[str] = "cute_kernels.kernels.graph:no_graph"

    problem: PatchifyProblem
    config: None

    threads: int = 256

    @functools.cached_property
    def operands(self) -> tuple[base.Operand, ...]:
        """In memory: ``images`` in the problem's order. Written is ``x`` [batch * positions, row_elements]."""
        p = self.problem
        return (
            base.Operand("images", p.in_dtype),
            base.Operand("x", p.out_dtype, written=True),
            *base.sizes(batch=p.batch, grid_rows=p.height // p.patch, grid_columns=p.width // p.patch),
        )

    patch_pixels = number(lambda self: self.problem.channels * self.problem.patch**2)
    row_elements = number(lambda self: base.round_up(self.patch_pixels, ROW_BYTES // self.out_bytes))
    """From one row to the next: whole `ROW_BYTES`; what is beyond the patch is zero."""
    vectors = number(lambda self: self.row_elements * self.out_bytes // base.VECTOR_BYTES)
    """16-byte vectors of a row of the result."""

    @property
    def gathers_vectors(self) -> bool:
        """Threads keep the place of one vector in a patch, and gather and store it for one patch after the other.

        For patches whose rows of pixels are no whole vectors, in images whose rows are.
        """
        p = self.problem
        ragged = not p.channels_last and self.unit * self.out_bytes < base.VECTOR_BYTES
        whole_rows = p.width * self.in_bytes % base.VECTOR_BYTES == 0
        fits = p.channels * p.patch * (p.width * self.in_bytes + PITCH_PAD_BYTES) <= self.arch.smem_bytes
        # Where conversion alone makes vectors of the result of several units, dividing once per unit is cheap enough.
        return ragged and p.patch % 4 != 0 and whole_rows and fits and self.vectors <= self.threads

    overlaps = flag(lambda self: self.arch.compute_capability >= (9, 0))
    """The launch behind it may begin before it has ended, as architectures from 9.0 on allow."""
    compiled_in = fact(lambda self: {"gathers_vectors": self.gathers_vectors})

    @property
    def load_pixels(self) -> int:
        """Pixels that one thread loads at once: every strip of pixels begins on a multiple of them."""
        p = self.problem
        if self.gathers_vectors:
            return base.VECTOR_BYTES // self.in_bytes
        pixels = p.patch**2 * (p.channels if p.channels_last else 1)
        return math.gcd(pixels, base.VECTOR_BYTES // self.in_bytes)

    @property
    def unit(self) -> int:
        """Elements that are neighbours in the image and in a row alike, and moved at once."""
        p = self.problem
        run = p.patch
        if p.channels_last:
            run = p.patch * p.channels if p.order == "hwc" else 1
        return math.gcd(run, base.VECTOR_BYTES // max(self.in_bytes, self.out_bytes))

    @property
    def store_elements(self) -> int:
        """Elements that one thread stores at once."""
        if self.gathers_vectors:
            return base.VECTOR_BYTES // self.out_bytes
        return max(WORD_BYTES, self.unit * self.out_bytes) // self.out_bytes

    clusters = number(lambda self: self.problem.batch * (self.problem.height // self.problem.patch))
    roles = fact(lambda self: ("move",) * (self.threads // base.LANES))

    @property
    def smem(self) -> tuple[base.SmemRegion, ...]:
        p = self.problem
        pitch = p.width * self.in_bytes + PITCH_PAD_BYTES * self.gathers_vectors
        return (base.SmemRegion("pixels of a row of patches", 0, p.channels * p.patch * pitch, 16),)

    def describe_problem(self) -> str:
        p = self.problem
        return f"{describe_images(p)} -> rows [{p.batch * p.positions}, {self.row_elements}] {p.out_dtype}, {p.order}"


def plan_patchify(problem: PatchifyProblem, arch: base.Arch) -> PatchifyPlan:
    """The plan, or ValueError naming the limit, the value and the nearest legal value."""
    p = problem
    base.require("in_dtype", p.in_dtype, PIXEL_TYPES, "element type of the pixels")
    rule = f"element type of the rows from {p.in_dtype} pixels"
    base.require("out_dtype", p.out_dtype, CONVERSIONS[p.in_dtype], rule)
    base.require("order", p.order, ("chw", "hwc"), "order of the pixels in a row")
    for name in ("batch", "channels", "patch"):
        if getattr(p, name) < 1:
            base.reject(name, getattr(p, name), "there is nothing to lay out", 1)
    for name in ("height", "width"):
        value = getattr(p, name)
        if value < p.patch or value % p.patch:
            base.reject(name, value, f"whole patches of {p.patch} pixels", max(p.patch, value - value % p.patch))
    if p.order == "hwc" and not p.channels_last:
        base.reject("order", p.order, "pixels whose channels are planes are gathered in the order of the planes", "chw")
    plan = PatchifyPlan(problem, None, arch, arch.sm_count)
    if plan.smem_bytes > arch.smem_bytes:
        rule = f"a row of patches is {plan.smem_bytes:,} B of shared memory, the limit is {arch.smem_bytes:,} B"
        base.reject("width", p.width, rule, p.width * arch.smem_bytes // plan.smem_bytes // p.patch * p.patch)
    if plan.clusters > 2**31 - 1:
        base.reject("batch", p.batch, "a grid has at most 2^31 - 1 CTAs", (2**31 - 1) // (plan.clusters // p.batch))
    return plan
