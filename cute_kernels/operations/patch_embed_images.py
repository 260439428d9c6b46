"""`patch_embed_images`: its arguments, what they have to be, and what the kernel gets of them."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from cute_kernels.config import (
    ImagesConfig,
    PatchEmbedConfig,
    PatchEmbedImagesProblem,
    Sm90ImagesConfig,
    Sm100ImagesConfig,
    name_of,
)
from cute_kernels.operations import arguments, reference
from cute_kernels.operations.arguments import Backend
from cute_kernels.operations.base import (
    ROW_BYTES,
    Operation,
    Prepared,
    are_of_a_device,
    dispatch_is_intercepted,
    launch,
    random_values,
)
from cute_kernels.operations.derivatives import image_gradient
from cute_kernels.operations.patch_weight import WIDE_TYPES, PatchWeight, prepare_patch_weight, strip_weight
from cute_kernels.operations.runtime import devices
from cute_kernels.operations.runtime.constants import DERIVED
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.operations.runtime.repeat import KeptPlan
from cute_kernels.operations.scales import in_kernel_order
from cute_kernels.operations.sharding import Shape, Sharding
from cute_kernels.operations.table import build_table, fragment_table, rows_table
from cute_kernels.plan import ARCHS
from cute_kernels.plan.images import ImagesPlan, multiplied_type, pixel_types
from cute_kernels.plan.images_chain import RowsChainPlan
from cute_kernels.plan.images_gather import Sm90GatherPlan
from cute_kernels.plan.images_sm80 import Sm80ImagesPlan
from cute_kernels.plan.images_strips import why_no_operand
from cute_kernels.plan.patchify import PatchifyProblem, plan_patchify
from cute_kernels.plan.registry import PATCH_EMBED_IMAGES as PLANNER

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PRECISIONS = {dtype: name for name, dtype in WIDE_TYPES.items()}


def patch_embed_images(
    images: torch.Tensor,
    weight: PatchWeight,
    bias: torch.Tensor | None = None,
    pos_embed: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    config: ImagesConfig | PatchEmbedConfig | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Patch embedding of images: what a normalisation, a Conv2d of stride p and the addition of positions give.

    With ``"int8"`` weights the kernel reads uint8 pixels out of the images themselves; the processor's normalisation is
    in the prepared weight. Sums of products are integers and exact, so that the result is the same in every bit on
    every device: ``round(fma32(fp32(sum), scale[n], table[s, n]))`` with ``table = (bias + offset) + pos_embed``, each
    addition rounded to FP32 and absent addends left out. With ``"bf16"`` and ``"fp16"`` weights the kernel reads 16-bit
    pixels and accumulates in FP32: ``round(accumulator + table[s, n])``.
    `cute_kernels.operations.reference.patch_embed_images` says the same in plain torch for all precisions.

    A kernel can read the images themselves where a patch's row of pixels is a multiple of 16 bytes, 128 at most: with
    ``"int8"`` weights patches of 16, 32, 48 and so on, of channels_last images with three channels of 16 and 32, on
    SM90 also patches of 14; with ``"bf16"`` and ``"fp16"`` weights patches of 16, 32 and 64; on SM100 patches of 16 in
    planes. Otherwise, and on SM90 where modelled time is less, a pass lays out patches as rows, and the kernel of
    `cute_kernels.patch_embed` multiplies these, launched as its dependent. The rows, of as many bytes as the pixels,
    are memory of the call. The plan says which and why.

    Args:
        images: ``[B, C, H, W]``, H and W whole patches. uint8 with the raw values 0 to 255; with ``"bf16"`` and
            ``"fp16"`` weights also normalised bfloat16, float16 or float32. With these weights, pixels of another type
            than the weight's are rounded to it by every call, in a pass of its own where a kernel reads images. B may
            be 0. Images that are not contiguous or do not begin on 16 bytes are copied by every call; channels_last
            ones with ``"int8"`` weights are taken as they are.
        weight: of `cute_kernels.prepare_patch_weight`, for these C and patches.
        bias: ``[N]`` BF16, FP16 or FP32, any stride, or None. What the kernel reads of bias and positions is laid out
            once and found again, as for `cute_kernels.patch_embed`.
        pos_embed: ``[S, N]`` likewise, positions in row-major order of the patch grid, S = H / p * W / p.
        out_dtype: ``torch.bfloat16``; where a kernel reads images with ``"bf16"`` and ``"fp16"`` weights, and in plain
            torch, also float16 and float32.
        config: tunables of the kernel: `Sm100ImagesConfig`, or of SM90 `Sm90ImagesConfig` with ``"int8"``
            weights and `Sm90GatherConfig` with ``"bf16"`` and ``"fp16"``. With `Sm100PatchEmbedConfig` or
            `Sm90PatchEmbedConfig` a pass lays out rows whatever the images, for a kernel with these tunables. None
            takes the plan's default. An illegal one is refused everywhere.
        backend: ``"auto"``: the compiled kernel for CUDA tensors, plain torch for CPU tensors. ``"emulator"``: the
            compiled PTX, executed on the CPU: SM90's, or SM100's with an `Sm100ImagesConfig`. ``"reference"``: plain
            torch on any device.

    Returns:
        ``[B, S, N]``, contiguous. Derivatives for ``bias``, ``pos_embed``, images that are normalised and the tensor
        that a ``"bf16"`` or ``"fp16"`` weight was prepared from are products of plain torch; uint8 images of a weight
        that wants one are normalised in FP32 first. Others, and those in forward mode, raise NotImplementedError. Of
        DTensors, the buffers of the weight among them, it is a DTensor (`cute_kernels.operations.sharding`).

    Raises:
        TypeError: an argument of the wrong type, element type or layout.
        ValueError: a wrong shape, device, backend or config value, or a problem that no kernel takes: results
            other than BF16 of integer weights or of rows, a row of patches beyond shared memory.
        NotImplementedError: a device without a kernel.
    """
    if not isinstance(weight, PatchWeight):
        raise TypeError(f"weight is {type(weight).__name__}: must be what cute_kernels.prepare_patch_weight returns")
    if not isinstance(images, torch.Tensor):
        raise TypeError(f"images is {type(images).__name__}: must be torch.Tensor")
    held = weight._buffers  # attributes of modules are found much more slowly
    raw = images.dtype is torch.uint8
    if raw and held["raw"].requires_grad and torch.is_grad_enabled():
        images, raw = weight.normalise(images), False
    values = held["raw"] if raw else held["normalised"]
    if values is None:
        raise TypeError(
            f"images has dtype {images.dtype} with a weight of precision {weight.precision!r}: must be torch.uint8"
        )
    offset = held["offset"] if raw else None
    return PATCH_EMBED_IMAGES.call(
        (images, values, held["scale"], offset, bias, pos_embed, weight.patch, out_dtype, backend, config)
    )


def _constant(*dtypes: torch.dtype) -> torch.Tensor | None:
    return arguments.tensor(*dtypes, optional=True, role="constant")


@dataclass(frozen=True, eq=False)
class PatchEmbedImagesArguments:
    """The table of arguments; a prepared weight travels as its tensors."""

    images: torch.Tensor = arguments.tensor(torch.uint8, *_FLOATS, shapes=("[B, C, H, W]",))
    weight: torch.Tensor = arguments.tensor(torch.int8, *_PRECISIONS, shapes=("[N, K]",), dense=True, role="constant")
    weight_scale: torch.Tensor | None = _constant(torch.float32)
    weight_offset: torch.Tensor | None = _constant(torch.float32)
    bias: torch.Tensor | None = _constant(*_FLOATS)
    pos_embed: torch.Tensor | None = _constant(*_FLOATS)
    patch: int = arguments.plain("int patch", int)
    out_dtype: torch.dtype = arguments.plain("ScalarType out_dtype", torch.dtype)
    backend: Backend = arguments.backend()
    config: ImagesConfig | PatchEmbedConfig | None = arguments.config(PLANNER.codec)


class _PatchEmbedImages(Operation[PatchEmbedImagesArguments]):
    planner = PLANNER
    arguments = PatchEmbedImagesArguments
    differentiable = ("images", "weight", "weight_offset", "bias", "pos_embed")
    rotated = "images"

    def problems(self, a: PatchEmbedImagesArguments) -> Iterator[Exception]:
        _, channels, height, width = a.images.shape
        n, k = a.weight.shape
        patch = a.patch
        if patch < 1:
            yield ValueError(f"patch = {patch}: must be at least 1")
            return
        if k != channels * patch * patch:
            made_for = k // patch**2
            yield ValueError(f"images has C = {channels}: must be C = {made_for}, which weight was prepared for")
        for name, extent in (("H", height), ("W", width)):
            if extent < patch or extent % patch:
                nearest = max(patch, (extent + patch // 2) // patch * patch)
                yield ValueError(
                    f"images has {name} = {extent}: must be whole patches, multiples of {patch}, nearest {nearest}"
                )
        if a.weight.dtype is torch.int8 and a.images.dtype is not torch.uint8:
            yield TypeError(f"images has dtype {a.images.dtype} with an integer weight: must be torch.uint8")
        integers = a.weight.dtype is torch.int8
        if (a.weight_scale is not None) != integers:
            yield TypeError(f"weight has dtype {a.weight.dtype}: integers alone have weight_scale")
        if n % 8:
            yield ValueError(f"weight has N = {n}: must be multiples of 8")
        positions = height // patch * (width // patch)
        shapes = {
            "weight_scale": (n,),
            "weight_offset": (n,),
            "bias": (n,),
            "pos_embed": (positions, n),
        }
        for name, shape in shapes.items():
            value = getattr(a, name)
            if value is not None and tuple(value.shape) != shape:
                words = "[S, N]" if name == "pos_embed" else "[N]"
                yield ValueError(f"{name} has shape {list(value.shape)}: must be {words} = {list(shape)}")
        if a.out_dtype not in _FLOATS:
            yield ValueError(f"out_dtype = {a.out_dtype}: must be one of {', '.join(map(str, _FLOATS))}")

    def problem(self, a: PatchEmbedImagesArguments) -> PatchEmbedImagesProblem:
        batch, channels, height, width = a.images.shape
        addends = (a.weight_offset, a.bias, a.pos_embed)
        positions = height // a.patch * (width // a.patch)
        precision = _PRECISIONS.get(a.weight.dtype, "int8")
        in_dtype = name_of(a.images.dtype)
        if in_dtype not in pixel_types(a.patch, precision):
            in_dtype = multiplied_type(in_dtype, precision)
        last = not a.images.is_contiguous() and a.images.is_contiguous(memory_format=torch.channels_last)
        problem = PatchEmbedImagesProblem(
            batch=batch,
            channels=channels,
            height=height,
            width=width,
            patch=a.patch,
            n=a.weight.shape[0],
            in_dtype=in_dtype,
            channels_last=last and precision == "int8",
            precision=precision,
            out_dtype=name_of(a.out_dtype),
            table_rows=positions if a.pos_embed is not None else int(any(x is not None for x in addends)),
        )
        # With the configuration of a kernel that reads images, those that it takes as planes alone are copied.
        sm90 = isinstance(a.config, Sm90ImagesConfig)
        if isinstance(a.config, Sm100ImagesConfig) or (sm90 and why_no_operand(problem)):
            return dataclasses.replace(problem, channels_last=False)
        return problem

    def converted(self, values: tuple) -> tuple:
        """With pixels in the type that a kernel which reads images multiplies: rounded behind the checks, they would be
        another tensor than the one that was given.
        """
        images, weight, _, _, _, _, patch, *_ = values
        precision = _PRECISIONS.get(weight.dtype)
        if precision is None or images.dtype is weight.dtype or images.dtype not in (torch.uint8, *_FLOATS):
            return values
        if name_of(images.dtype) in pixel_types(patch, precision):
            return values
        return images.to(weight.dtype), *values[1:]

    def prepare(self, a: PatchEmbedImagesArguments, plan: ImagesPlan | RowsChainPlan) -> Prepared:
        """Makes the images contiguous, aligned and of the weight's type, builds the table, allocates the output."""
        images = a.images.to(getattr(torch, plan.problem.in_dtype))
        if not plan.problem.channels_last:
            images = images.contiguous()
        images = images if images.data_ptr() % ROW_BYTES == 0 else images.clone()
        if isinstance(plan, RowsChainPlan):
            return self._prepare_chain(a, plan, images)
        operands = Operands(
            images=images,
            weight=_weight(a.weight, plan),
            scale=a.weight_scale,
            table=self._table(a, plan),
            out=torch.empty(self.output_shape(a), dtype=a.out_dtype, device=a.images.device),
        )
        return Prepared(plan, operands, self.output_shape(a))

    def _prepare_chain(self, a: PatchEmbedImagesArguments, plan: RowsChainPlan, images: torch.Tensor) -> Prepared:
        """Rows of memory between the kernels, the weight in their order, and what the kernel over rows reads."""
        problem, sources = plan.rows.problem, (a.weight_offset, a.bias, a.pos_embed)
        memory = functools.partial(torch.empty, device=a.images.device)
        operands = Operands(
            images=images,
            x=memory(problem.m, problem.k, dtype=getattr(torch, problem.in_dtype)),
            weight=DERIVED.get(("rows", plan.order, problem.k), (a.weight,), lambda: _weight_rows(a, plan)),
            table=rows_table(plan.rows, sources, lambda: (_shifted(a), a.pos_embed)),
            scale=1.0,
            feature_scale=in_kernel_order(a.weight_scale),
            out=memory(plan.problem.batch * plan.problem.positions, problem.n, dtype=a.out_dtype),
        )
        return Prepared(plan, operands, self.output_shape(a))

    def _table(self, a: PatchEmbedImagesArguments, plan: ImagesPlan) -> torch.Tensor | None:
        shape, addends = plan.table_shape, (a.weight_offset, a.bias, a.pos_embed)
        if shape is None:
            return None
        if isinstance(plan, (Sm90GatherPlan, Sm80ImagesPlan)):
            if DERIVED.keeps_nothing and _is_table(a.pos_embed, shape) and _shifted(a) is None:
                return a.pos_embed
            return DERIVED.get(("table rows", shape), addends, lambda: build_table(_shifted(a), a.pos_embed, shape))
        parts = (shape, plan.problem.grid_width, plan.tile_patches)
        return DERIVED.get(("fragments", *parts), addends, lambda: fragment_table(_shifted(a), a.pos_embed, *parts))

    def smallest(self, problem: PatchEmbedImagesProblem) -> PatchEmbedImagesProblem:
        return dataclasses.replace(problem, batch=1)

    def smaller(self, problem: PatchEmbedImagesProblem) -> Iterator[PatchEmbedImagesProblem]:
        """Few images."""
        for batch in (2, 4, 8, 16, 32):
            yield dataclasses.replace(problem, batch=min(problem.batch, batch))

    def example(self, problem: PatchEmbedImagesProblem, device: str = "cpu") -> PatchEmbedImagesArguments:
        p = problem
        draw = functools.partial(random_values, device=device)
        kernel = draw(p.n, p.channels, p.patch, p.patch, dtype=torch.float32)
        weight = prepare_patch_weight(kernel, precision=p.precision, channels=p.channels)
        images = draw(p.batch, p.channels, p.height, p.width, dtype=getattr(torch, p.in_dtype))
        if p.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        raw = p.in_dtype == "uint8"
        return self.given(
            images=images,
            weight=weight.raw if raw else weight.normalised,
            weight_scale=weight.scale,
            weight_offset=weight.offset if raw and p.table_rows else None,
            bias=draw(p.n, dtype=torch.float32) if p.table_rows else None,
            pos_embed=draw(p.table_rows, p.n, dtype=torch.float32) if p.table_rows > 1 else None,
            patch=p.patch,
            out_dtype=getattr(torch, p.out_dtype),
        )

    def shardings(self, shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
        """Images, rows of patches, features.

        Rows of pixels are divided where every part has whole patches: positions count them row by row, so that a part's
        are neighbours. Of the weight, all that is made per feature is divided with it.
        """
        images, (n, k) = shapes["images"], shapes["weight"]
        patch = math.isqrt(k // images[1])
        yield 0, {"images": 0}
        if images[2] % (patch * parts) == 0:
            yield 1, {"images": 2, "pos_embed": 0}
        if n % (8 * parts) == 0:
            per_feature = ("weight", "weight_scale", "weight_offset", "bias")
            yield 2, dict.fromkeys(per_feature, 0) | {"pos_embed": 1}

    def reference(self, a: PatchEmbedImagesArguments) -> torch.Tensor:
        return reference.patch_embed_images(
            a.images, a.weight, a.weight_scale, _shifted(a), a.pos_embed, a.patch, a.out_dtype
        )

    def gradients(self, a: PatchEmbedImagesArguments, grad: torch.Tensor, facts) -> dict[str, torch.Tensor]:
        rows, dtype, found = grad.flatten(0, -2), facts["weight"].dtype, {}
        sums = grad.sum(0, dtype=torch.float32) if "pos_embed" in facts.wanted else rows
        found["pos_embed"] = sums
        for name in {"bias", "weight_offset"} & facts.wanted:
            found[name] = sums.sum(0, dtype=torch.float32)
        if "images" in facts.wanted:
            found["images"] = image_gradient(rows.to(dtype) @ a.weight, facts["images"].shape, a.patch)
        if "weight" in facts.wanted:
            found["weight"] = rows.to(dtype).T @ _rows_of(a, dtype)
        return found

    def output_shape(self, a: PatchEmbedImagesArguments) -> tuple[int, ...]:
        batch, _, height, width = a.images.shape
        return batch, height // a.patch * (width // a.patch), a.weight.shape[0]

    def output_dtype(self, a: PatchEmbedImagesArguments) -> torch.dtype:
        return a.out_dtype


def _rows_of(a: PatchEmbedImagesArguments, dtype: torch.dtype) -> torch.Tensor:
    """`reference.patch_rows` of the images in a type, by the pass where nothing looks at operators: of 4,096 images of
    224 in 0.66 ms, and in torch's copy in 2.40 (H200)."""
    images, kept = a.images, None
    looked_at = torch.is_grad_enabled() or dispatch_is_intercepted()
    if a.backend == "auto" and not looked_at and are_of_a_device([images]) and images.is_contiguous():
        arch, _ = devices.device_facts(images.get_device())
        kept = _pass_of(images.shape, a.patch, images.dtype, dtype, arch)
    if kept is None or images.data_ptr() % ROW_BYTES:
        return reference.patch_rows(images.to(dtype), a.patch)
    plan = kept.plan
    rows = images.new_empty(plan.problem.batch * plan.problem.positions, plan.row_elements, dtype=dtype)
    operands = Operands(images=images, x=rows)
    if devices.is_emulated():
        launch("program", plan, operands)
    else:
        kept.launch(operands)
    return rows[:, : plan.patch_pixels]


@functools.lru_cache(maxsize=1024)
def _pass_of(
    shape: tuple[int, ...], patch: int, pixels: torch.dtype, dtype: torch.dtype, arch: str
) -> KeptPlan | None:
    """The pass that makes rows ``x`` of ``images``; None where rows of patches do not fit shared memory."""
    problem = PatchifyProblem(*shape, patch, name_of(pixels), name_of(dtype))
    try:
        return KeptPlan(plan_patchify(problem, ARCHS[arch]), ("images", "x"))
    except ValueError:
        return None


def _weight(weight: torch.Tensor, plan: ImagesPlan) -> torch.Tensor:
    """In the kernel's order of K, on 16 bytes, as TMA reads it."""
    channels_last, splits = plan.problem.channels_last, getattr(plan, "splits", False)
    if channels_last or splits or plan.weight_columns_of_k != plan.problem.k:
        key = ("strips", channels_last, splits, plan.weight_columns_of_k)
        return DERIVED.get(key, (weight,), lambda: strip_weight(weight, plan))
    if weight.data_ptr() % ROW_BYTES == 0:
        return weight
    return DERIVED.get(("aligned",), (weight,), weight.clone)


def _is_table(pos_embed: torch.Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether a kernel reads positions as they are."""
    if pos_embed is None or pos_embed.dtype is not torch.float32 or tuple(pos_embed.shape) != shape:
        return False
    return pos_embed.is_contiguous() and pos_embed.data_ptr() % ROW_BYTES == 0


def _shifted(a: PatchEmbedImagesArguments) -> torch.Tensor | None:
    """``bias + offset``, one FP32 addition, or what is there of them."""
    if a.bias is None or a.weight_offset is None:
        return a.weight_offset if a.bias is None else a.bias
    return a.bias.to(torch.float32) + a.weight_offset


def _weight_rows(a: PatchEmbedImagesArguments, plan: RowsChainPlan) -> torch.Tensor:
    """The weight in the order of the rows that the pass writes, zero-padded likewise; it begins on 16 bytes."""
    weight, p = a.weight, plan.problem
    if p.channels_last:
        weight = weight.view(-1, p.channels, p.patch, p.patch).permute(0, 2, 3, 1).reshape(weight.shape)
    padded = weight.new_zeros(weight.shape[0], plan.rows.problem.k)
    padded[:, : weight.shape[1]] = weight
    return padded


PATCH_EMBED_IMAGES = _PatchEmbedImages()
