"""The two inputs of planning: what is asked (a problem class per operation) and how (a config class per kernel).

All are frozen, hashable and free of torch and of hardware limits: they check the types of their fields, which raises as
`Typed` says, and `cute_kernels.plan` is the only judge of legality. A field of a config that is None is open: the plan
chooses it for the problem (`cute_kernels.plan.choose`), and a plan's own config has none.
"""

import inspect
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from cute_kernels.common.facts import flag, number

# --- element types by torch's names, without torch --------------------------------------------------------------------

ITEMSIZE = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element."""

WEIGHT_TYPES = {
    "float8_e4m3fn": "float8_e4m3fn",
    "uint8": "int8",
    "int8": "int8",
    "bfloat16": "bfloat16",
    "float16": "float16",
}
"""Element type of the second operand of a product, a weight, by that of the first."""

LARGEST_PRODUCT = {"uint8": 255 * 128, "int8": 128 * 128}
"""Magnitude of one product of integers; sums of K of them have 32 bits."""


def longest_row(in_dtype: str) -> int | None:
    """The largest K whose sums of products fit 32-bit integers, in whole 16 bytes; None of floating-point numbers."""
    if in_dtype not in LARGEST_PRODUCT:
        return None
    return (2**31 - 1) // LARGEST_PRODUCT[in_dtype] // 16 * 16


def name_of(dtype: object) -> str:
    """Name of a torch dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


# --- types: what dataclasses do not check themselves -----------------------------------------------------------------

class Typed:
    """Base of frozen dataclasses of integers, bools and strings: each field has the type of its annotation.

    Integers of any library become ``int``. Equal configurations must be the same key of a cache, in memory and, by
    their ``repr``, on disk: ``np.int64(4)``, ``4.0`` and ``True`` would be equal to integers and yet be keys of their
    own.

    Raises:
        TypeError: a value of another type, naming the field.
        ValueError: an integer other than 0 and 1 in place of a bool.

    Attributes:
        types: by the name of a field its type, ``int``, ``bool`` or ``str``, and whether it may be None.
    """

    types: ClassVar[Mapping[str, tuple[type, bool]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, kind in inspect.get_annotations(cls, eval_str=True).items():
            own = [each for each in (int, bool) if each in (kind, *get_args(kind))] or [str]
            cls.types = cls.types | {name: (own[0], type(None) in get_args(kind))}

    def __post_init__(self) -> None:
        for name, (kind, is_open) in self.types.items():
            value = getattr(self, name)
            if type(value) is kind or (value is None and is_open):
                continue
            if kind is int:
                checked = _integer(name, value)
            elif kind is bool:
                checked = _boolean(name, value)
            elif isinstance(value, str):
                checked = str(value)
            else:
                raise TypeError(f"{name} = {value!r} is {type(value).__name__}: must be a string")
            object.__setattr__(self, name, checked)


def type_name(value: Any) -> str:
    """A type in messages, with its module: NumPy has a ``bool`` that is none of Python's."""
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def check_choice(name: str, value: object, allowed: Iterable[object], hint: str = "") -> None:
    """Raises ValueError for a value that is not one of those allowed, naming it and them, with ``hint`` behind."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(map(repr, allowed))}{hint}")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} = {value!r} is {type(value).__name__}: must be an integer")
    return operator.index(value)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} = {value!r} is {type_name(value)}: must be True or False")
    # An operator schema passes a bool among integers as 0 or 1.
    if operator.index(value) not in (0, 1):
        raise ValueError(f"{name} = {value!r}: must be True, False")
    return operator.index(value) == 1


# --- what is computed, and how ----------------------------------------------------------------------------------------

EpilogueArithmetic = Literal["f32", "bf16x2"]
ScaleSource = Literal["value", "pointer"]
WeightSource = Literal["registers", "streamed"]
RowOrder = Literal["position", "flat"]
TableFormat = Literal["row_major", "interleaved"]
PixelSource = Literal["strips", "gather", "repack", "split"]
WeightMemory = Literal["tmem", "smem"]
TileOrder = Literal["row", "image"]
Tf32Rounding = Literal["nearest", "nearest_a", "truncate"]
Activation = Literal["none", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]
ACTIVATIONS = get_args(Activation)
"""Activations of the dense GEMM's epilogue: `cute_kernels.operations.reference.activations`."""

LAUNCH_ARGUMENT = {"launch_argument": True}
"""Metadata of a problem's field that kernels take as an argument of every launch.

Code is compiled anew for another value of any other field (`Plan.kernel_key`), so that a forgotten mark costs
compilations and never correctness. What a plan derives from such a field for the compiler is in `Plan.compiled_in`.
"""


@dataclass(frozen=True)
class PatchEmbedProblem(Typed):
    """Facts of one call of ``out[m, n] = scale[m, n] * sum_k x[m, k] * w[n, k] + table[row(m), n]``.

    The scale is the FP32 product of one number for each row of ``x`` and one for each feature; where either is the same
    for all, it is part of a number for the whole call.

    Attributes:
        m: rows of ``x`` and of the output (images x positions for patch embedding).
        n: output features, rows of the weight.
        k: input features in elements, after zero-padding to whole 16-byte rows.
        table_rows: rows of the bias + position table: 0 (absent), 1 (bias only) or the number of positions.
        table_index: ``row(m)`` is read from an index in memory, one number per row of ``x``; otherwise it is
            ``m % table_rows``.
        in_dtype: element type of ``x`` as torch names it: float8_e4m3fn, uint8, int8, bfloat16 or float16. The weight
            has the same, int8 for uint8.
        out_dtype: element type of the output, as torch names it.
        scale_source: where the number for the whole call is: ``"value"`` passes it in the launch parameters,
            ``"pointer"`` reads one FP32 from device memory when the kernel starts.
        row_scale: every row of ``x`` has a factor of its own, in memory.
        feature_scale: every feature has a factor of its own, in memory. With both there is no number for the whole
            call.
    """

    m: int = field(metadata=LAUNCH_ARGUMENT)
    n: int = field(metadata=LAUNCH_ARGUMENT)
    k: int = field(metadata=LAUNCH_ARGUMENT)
    table_rows: int = field(default=0, metadata=LAUNCH_ARGUMENT)
    in_dtype: str = "float8_e4m3fn"
    out_dtype: str = "bfloat16"
    scale_source: ScaleSource = "value"
    table_index: bool = False
    row_scale: bool = False
    feature_scale: bool = False

    call_scale = flag(lambda self: not (self.row_scale and self.feature_scale))
    """There is a number for the whole call."""

@dataclass(frozen=True)
class Sm100PatchEmbedConfig(Typed):
    """Tunables of the SM100a kernel, with the experiments of the CUDA original behind them (docs/experiments.md).

    Attributes:
        tile_n: output columns of a tile, 128 or 256 (F12).
        stages: operand buffers between TMA and tensor core (F6).
        epilogue_warps: 4 or 5; with 5, two warps share one quarter of the tensor-memory lanes and split its columns
            (F3, F4).
        tmem_load_width: columns of one ``tcgen05.ld.32x32b``: 16, 32 or 64 (F1, F8, F32).
        epilogue: ``"f32"`` rounds once; ``"bf16x2"`` rounds the scaled accumulator and adds a BF16 table in packed
            BF16, as the CUDA original does (F22).
        cta_group: CTAs that multiply together: a pair, whose tile has 256 rows and whose CTAs load half of the weight
            tile each, or 1, with tiles of 128 rows.
        order: ``"position"``: a tile is ``rows / tile_positions`` images at ``tile_positions`` positions, so that every
            epilogue warp adds one row of the table to all of its rows; ``"flat"``: consecutive rows, each with a table
            row of its own; None: the one whose busiest cluster has less to move through shared memory.
        tile_positions: neighbouring positions of a tile in position order, a power of two; a tile has at least 32
            images, the rows of a warp. None: as many as give the fewest tiles.
        snake: every other row of tiles runs backwards, so that its first tile takes the last weight again.
        table: layout of the bias + position table. ``"row_major"``; ``"interleaved"``: 16 bytes of each of 32 rows side
            by side, what the lanes of a warp load together; None: row-major in position order, interleaved in flat
            order.
        store_buffers: regions of 64 columns that a warp stages at the same time, 1, 2 or 4; fewer leave room for more
            stages.
        stagger_clocks: the warps of an epilogue begin a tile this many clocks after one another (F31).
    """

    tile_n: int = 256
    stages: int = 4
    epilogue_warps: int = 5
    tmem_load_width: int = 32
    epilogue: EpilogueArithmetic = "f32"
    cta_group: int = 2
    order: RowOrder | None = None
    tile_positions: int | None = None
    snake: bool = True
    table: TableFormat | None = None
    store_buffers: int = 4
    stagger_clocks: int = 80

@dataclass(frozen=True)
class Sm100ResidentConfig(Typed):
    """Tunables of the SM100a kernel whose weight stays on chip, ``out^T = weight * x^T``: features are the lanes of
    tensor memory, 128 per CTA, and rows of ``x`` the columns of an accumulator.

    `Sm100PatchEmbedConfig` has those of the kernel that streams the weight. Fields whose default is None
    are chosen for the problem.

    Attributes:
        weight: where it stays. ``"tmem"``: tensor memory, 32 columns for 128 bytes of K; ``"smem"``: shared memory, 16
            KiB for 128 bytes of K, which every MMA reads again.
        order: as in `Sm90PatchEmbedConfig`. A flat order is for rows that are no whole images, for fewer than eight
            images, and for an index: every row then reads its table row.
        tile_rows: rows of ``x`` in a tile, the N of an MMA: multiples of 16 for each CTA, up to 256.
        tile_positions: neighbouring positions of a tile in position order. Each CTA has a multiple of 8 images.
        cta_group: CTAs that multiply together: a pair, each with half of the images of a tile, or 1.
        accumulators, mma_columns: as in `Sm100ImagesConfig`.
        tmem_load_width: columns of one ``tcgen05.ld.16x256b``: 16, 32 or 64.
        stages: operand buffers between TMA and tensor core; None: two tiles' worth, or what shared memory holds.
        stage_blocks: K blocks of 128 bytes in one stage, 1 or 2.
        epilogue: as in `Sm100PatchEmbedConfig`.
    """

    weight: WeightMemory | None = None
    order: RowOrder | None = None
    tile_rows: int | None = None
    tile_positions: int | None = None
    cta_group: int | None = None
    accumulators: int | None = None
    mma_columns: int | None = None
    tmem_load_width: int | None = None
    stages: int | None = None
    stage_blocks: int = 1
    epilogue: EpilogueArithmetic = "f32"

@dataclass(frozen=True)
class Sm90PatchEmbedConfig(Typed):
    """Tunables of the SM90a kernel, which computes ``out^T = weight * x^T``: features are the rows of a WGMMA.

    The measurements behind the defaults are in docs/performance.md.

    Attributes:
        tile_rows: rows of ``x`` in a tile, the N of a WGMMA: a multiple of 16 up to 256.
        warpgroups: consumer warpgroups of a CTA, 1 to 3, each with 64 output features.
        stages: operand buffers between TMA and WGMMA, at most 64; None: two tiles' worth, or what shared memory holds.
        stage_blocks: K blocks of 128 bytes in one stage, 1 to 4: with 2 a warpgroup waits and signals half as often.
        cluster: 1 or 2 CTAs that share every tile of ``x`` by multicast and differ in their features.
        weight: ``"registers"``: each warpgroup keeps its 64 features for the whole launch (K is compiled in);
            ``"streamed"``: weight tiles come through shared memory with ``x``, for any K.
        order: ``"position"``: a tile is ``tile_rows / tile_positions`` images at ``tile_positions`` positions, so that
            bias + position is one vector for each of these; ``"flat"``: consecutive rows, with the table read per
            element; None: position order for whole images that fill half a tile or more.
        tile_positions: neighbouring positions of a tile in position order: few images then fill a tile of many rows.
            The images of a tile are a multiple of 8, the columns of a WGMMA core matrix.
        pingpong: warpgroups take turns on the tensor cores, so that one's epilogue runs under another's WGMMAs.
        epilogue: as in `Sm100PatchEmbedConfig`.
    """

    tile_rows: int = 128
    warpgroups: int = 2
    stages: int | None = None
    stage_blocks: int = 2
    cluster: int = 2
    weight: WeightSource = "registers"
    order: RowOrder | None = None
    pingpong: bool = True
    epilogue: EpilogueArithmetic = "f32"
    tile_positions: int = 1

@dataclass(frozen=True)
class PatchEmbedImagesProblem(Typed):
    """Facts of one call of ``out[b, s, n] = scale[n] * sum_k pixel[b, s, k] * w[n, k] + table[s, n]``.

    ``pixel[b, s, k]`` are the pixels of patch s of image b, k counts them by (channel, row, column), and s counts the
    patches row by row.

    Attributes:
        batch: images.
        channels, height, width: of an image, in pixels.
        patch: pixels of a patch along each side.
        n: output features, rows of the weight.
        in_dtype: element type of the images, as torch names it.
        channels_last: the channels of a pixel are neighbours in memory; otherwise the pixels of a row are.
        precision: ``"int8"``: integer weights with one FP32 scale per feature, exact sums; ``"bf16"``,
            ``"fp16"``: images and weight of that type, FP32 sums.
        table_rows: rows of the table: 0 (absent), 1 (bias only) or the number of patches of an image.
        out_dtype: element type of the output, as torch names it.
    """

    batch: int = field(metadata=LAUNCH_ARGUMENT)
    channels: int
    height: int = field(metadata=LAUNCH_ARGUMENT)
    width: int = field(metadata=LAUNCH_ARGUMENT)
    patch: int
    n: int = field(metadata=LAUNCH_ARGUMENT)
    in_dtype: str = "uint8"
    channels_last: bool = False
    precision: str = "int8"
    table_rows: int = field(default=0, metadata=LAUNCH_ARGUMENT)
    out_dtype: str = "bfloat16"
    grid_height = number(lambda self: self.height // self.patch)
    """Patches in a column of an image."""
    grid_width = number(lambda self: self.width // self.patch)
    """Patches in a row of an image, a grid row."""
    positions = number(lambda self: self.grid_height * self.grid_width)
    """Patches of an image."""
    k = number(lambda self: self.channels * self.patch * self.patch)
    """Pixels of a patch, in all channels."""


@dataclass(frozen=True)
class Sm90ImagesConfig(Typed):
    """Tunables of the SM90a kernel that reads patches out of images, ``out^T = weight * patches^T``.

    A tile is ``tile_patches`` neighbouring patches of a grid row in ``tile_images`` images, the N of a WGMMA.

    Attributes:
        source: how patches come out of the images. ``"strips"``: TMA boxes of whole pieces of image rows, which lie in
            shared memory as the WGMMA wants them; ``"gather"``: of the rows of single patches, where these are longer
            than 16 bytes; ``"split"``: likewise of rows of 48 and 96 bytes, each in two boxes, where ``"gather"``
            lengthens them to 64 and 128; ``"repack"``: strips of rows of 14 bytes, which warps lengthen to 16;
            None: what the images have.
        tile_patches: 1 to 16, also beyond a grid row; None: chosen for the problem, as for the fields below.
        tile_images: such that a tile has a multiple of 16 patches, up to 256; None: chosen.
        warpgroups: as in `Sm90PatchEmbedConfig`; None: what pads the features least, as for ``cluster``.
        cluster: as in `Sm90PatchEmbedConfig`; None: chosen.
        stages: operand buffers between TMA and WGMMA, at most 64; None: two tiles' worth, or what shared memory holds.
        stage_blocks: K blocks of 128 bytes in one stage, rows of a patch in one plane: 1 or 2, of split rows 3; None:
            chosen.
        pingpong: as in `Sm90PatchEmbedConfig`.
        order: ``"row"``: images run fastest, so that the table is read once per grid row; ``"image"``: positions do.
        weight: ``"registers"``: it stays there for the whole launch; ``"streamed"``: it comes through the stages with
            the pixels, for few images and for weights that registers do not hold; None: chosen.
        raw_stages: buffers of strips between TMA and the warps that repack rows of 14 bytes, at least 2, and 0 of other
            sources; None: chosen.
    """

    source: PixelSource | None = None
    tile_patches: int | None = None
    tile_images: int | None = None
    warpgroups: int | None = None
    cluster: int | None = None
    stages: int | None = None
    stage_blocks: int | None = None
    pingpong: bool = True
    order: TileOrder = "row"
    weight: WeightSource | None = None
    raw_stages: int | None = None

@dataclass(frozen=True)
class Sm100ImagesConfig(Typed):
    """Tunables of the SM100a kernel that reads patches of 16 x 16 out of images, ``out^T = weight * patches^T``.

    A tile is ``tile_patches`` neighbouring patches of a grid row in ``tile_images`` images, the columns of the
    accumulator; features are its rows, 128 per CTA, whose weight stays on chip for the whole launch.

    Attributes:
        source: ``"strips"`` of uint8 images, as in `Sm90ImagesConfig`; ``"gather"``: TMA boxes of the rows of single
            patches, of 16-bit images; None: what the images allow.
        tile_patches: 1 to 16; None: chosen for the problem, as for the fields below whose default is None. A
            tile may be wider than a grid row.
        tile_images: such that each CTA of a group has a multiple of 16 patches, and the tile up to 256.
        cta_group: CTAs that multiply together: a pair, each with half of the images of a tile, or 1.
        weight: where it stays. ``"tmem"``: tensor memory, 64 columns per channel, 128 of 16-bit images; ``"smem"``:
            shared memory, 32 or 64 KiB per channel, which every MMA reads again.
        accumulators: of a whole tile in tensor memory, 1 or 2.
        mma_columns: columns of an accumulator that are multiplied and handed to the epilogue at once, an MMA tile,
            of which the last may have fewer: while one is drained the next is multiplied, over the same stages.
        tmem_load_width: columns of one ``tcgen05.ld.16x256b``: 16 or 32.
        stages: operand buffers between TMA and tensor core; None: two tiles' worth, or what shared memory holds.
        stage_blocks: K blocks of 128 bytes in one stage, 8 rows of a patch in one channel each: 1 or 2.
        order: as in `Sm90ImagesConfig`.
    """

    source: PixelSource | None = None
    tile_patches: int | None = None
    tile_images: int | None = None
    cta_group: int | None = None
    weight: WeightMemory | None = None
    accumulators: int | None = None
    mma_columns: int | None = None
    tmem_load_width: int = 16
    stages: int | None = None
    stage_blocks: int = 2
    order: TileOrder = "row"

@dataclass(frozen=True)
class Sm90GatherConfig(Typed):
    """Tunables of the SM90a kernel that multiplies 16-bit patches out of images, both operands from shared memory.

    A tile is ``tile_patches`` neighbouring patches of each of ``tile_rows`` grid rows in ``tile_images`` images, all
    powers of two, by ``tile_n`` features. Its patches are 128 or 256; with ``pingpong``, where each warpgroup computes
    tiles of its own, 64 or 128.

    Attributes:
        tile_patches, tile_rows, tile_images: None: chosen such that few patches of the tiles lie outside of the images.
        row_patches: neighbouring patches of which TMA reads one row of pixels at once, 32 bytes each if p = 16: 1, 2 or
            4, of 128 bytes at most; the patches of a grid row are a multiple. None: as many as the grid row allows.
        tile_n: features of one CTA, multiples of 64 up to 256; None: chosen.
        cluster: CTAs with neighbouring features that share the patches by multicast: 1, 2 or 4; None: chosen.
        stages: operand buffers of 64 pixels of every patch between TMA and WGMMA; None: what shared memory holds, up
            to 8.
        store_stages: as in `Sm90GemmConfig`; None: two, or three or one where a tile is no whole number of pairs.
        pingpong: as in `Sm90GemmConfig`.
        order: ``"row"``: images run fastest; ``"image"``: positions do, so that neighbouring pixels are read together.
    """

    tile_patches: int | None = None
    tile_rows: int | None = None
    tile_images: int | None = None
    row_patches: int | None = None
    tile_n: int | None = None
    cluster: int | None = None
    stages: int | None = None
    store_stages: int | None = None
    pingpong: bool = False
    order: TileOrder = "image"

@dataclass(frozen=True)
class GemmProblem(Typed):
    """Facts of one call of ``out = activation(scale * (a @ b.T) + bias) + residual``, of operands ``[batches, .., K]``.

    The scale is the FP32 product of one number for each row of ``a`` and one for each row of ``b``, a column of the
    output; where either is the same for all, it is part of a number for the whole call.

    Attributes:
        m, n, k: rows of ``a``, rows of ``b`` and the elements they have in common.
        batches: independent products; ``a``, ``b`` and the output then have a leading dimension.
        in_dtype: element type of ``a``, as torch names it: bfloat16, float16, float8_e4m3fn, int8, uint8, or float32,
            which is rounded to TF32 on its way to the tensor core. ``b`` has the same, int8 for uint8.
        out_dtype: element type of the output: bfloat16, float16, float32 or float8_e4m3fn, which is divided by a number
            of the call first.
        bias: whether a vector of N values is added before the activation.
        activation: one of `ACTIVATIONS`, applied in FP32 before that rounding.
        scale_source: where the number for the whole call is: ``"value"`` passes it in the launch parameters,
            ``"pointer"`` reads one FP32 from device memory when the kernel starts.
        row_scale: every row of ``a`` has a factor of its own, in memory.
        column_scale: every column of the output has a factor of its own, in memory. With both there is no number for
            the whole call.
        residual: element type of what is added after the activation, bfloat16, float16 or float32; None: nothing.
        with_scale: there is a scale, although no other field says so and operands have more than 8 bits.
        bias_dtype: element type of the bias: bfloat16, float16 or float32.
        out_scale_source: where the number is that an output of float8_e4m3fn is divided by, as ``scale_source``.
    """

    m: int = field(metadata=LAUNCH_ARGUMENT)
    n: int = field(metadata=LAUNCH_ARGUMENT)
    k: int = field(metadata=LAUNCH_ARGUMENT)
    batches: int = field(default=1, metadata=LAUNCH_ARGUMENT)
    in_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    bias: bool = False
    activation: Activation = "none"
    scale_source: ScaleSource = "value"
    row_scale: bool = False
    column_scale: bool = False
    residual: str | None = None
    with_scale: bool = False
    bias_dtype: str = "float32"
    out_scale_source: ScaleSource = "value"

    @property
    def scaled(self) -> bool:
        """Sums are multiplied by a scale."""
        factors = self.row_scale or self.column_scale or self.scale_source == "pointer"
        return self.with_scale or factors or ITEMSIZE.get(self.in_dtype) == 1

    call_scale = flag(lambda self: self.scaled and not (self.row_scale and self.column_scale))
    """There is a number for the whole call."""

@dataclass(frozen=True)
class Sm100GemmConfig(Typed):
    """Tunables of the SM100a dense GEMM. The defaults are "Level 8" of the CUDA original; "Level 7" is
    ``Sm100GemmConfig(block_m=256, stages=4)`` (docs/experiments.md).

    Attributes:
        block_m: output rows of one CTA, 128 or 256; a pair of CTAs works on twice as many. With 256 every weight stage
            serves two UMMAs, at twice the shared memory for ``a``.
        tile_n: output columns of a pair: 64, 128 or 256.
        stages: operand buffers of 128 bytes of K between TMA and tensor core.
        store_stages: store buffers per epilogue warp, each 32 rows x 128 bytes.
        group_m: the tile order runs down this many blocks of rows before it takes the next column of tiles.
        cluster_m, cluster_n: CTAs of a cluster along rows and columns, as in `Sm90GemmConfig`. A pair is two CTAs along
            the rows; pairs in one column of the cluster share ``b`` by multicast, pairs in one row share ``a``.
        accumulators: accumulators of a whole tile in tensor memory. With 2 the epilogue drains one tile while the next
            is multiplied; 1 leaves room for tiles of twice the columns, whose MMA tiles are handed over one by one.
    """

    block_m: int = 128
    tile_n: int = 128
    stages: int = 8
    store_stages: int = 2
    group_m: int = 8
    cluster_m: int = 2
    cluster_n: int = 1
    accumulators: int = 2

@dataclass(frozen=True)
class Sm90GemmConfig(Typed):
    """Tunables of the SM90a dense GEMM: two consumer warpgroups, both operands from shared memory.

    Attributes:
        tile_m, tile_n: output tile of one CTA, or of one warpgroup with ``pingpong``. A warpgroup's share must be a
            multiple of 64 rows, ``tile_n`` a multiple of 16 up to 256. Of 64 rows without ``pingpong``, there is one
            consumer warpgroup.
        stages: operand buffers of 128 bytes of K between TMA and WGMMA.
        cluster_m, cluster_n: CTAs of a cluster along rows and columns: they share ``b`` and ``a`` by multicast.
        pingpong: each warpgroup computes tiles of its own, in turn, so that one's epilogue runs under the other's
            WGMMAs; otherwise both compute half of the rows of one tile.
        store_stages: store buffers per consumer warp, each 16 rows x 128 bytes.
        group_m: as in `Sm100GemmConfig`, in clusters.
        split_k: CTAs of a cluster that share one tile along K, 1, 2, 4 or 8, without pingpong: each sums its slice of
            K, and they add up their sums through distributed shared memory. For problems with fewer tiles than there
            are multiprocessors. The order of the additions changes with it: `cute_kernels.operations.reference.gemm`.
        transposed: computes ``out^T = b * a^T``: ``tile_m`` and ``cluster_m`` count columns of the output, ``tile_n``
            and ``cluster_n`` rows, of which a tile may then have any multiple of 16. Outputs of 16 bits.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = False
    store_stages: int = 2
    group_m: int = 8
    split_k: int = 1
    transposed: bool = False

@dataclass(frozen=True)
class Sm80Config(Typed):
    """Tunables that all kernels of ``mma.sync`` have, of any GPU since Ampere. One CTA computes one tile.

    Attributes:
        tile_m, tile_n: rows and columns of the output in a tile.
        warps_m, warps_n: warps of a CTA along rows and along columns, 4 or 8 in all.
        row_bytes: bytes of K in a stage, 64 or 128: what a row of either operand has of it in shared memory.
        stages: operand buffers between ``cp.async`` and ``ldmatrix``, 2 to 8.
        resident_ctas: CTAs that a multiprocessor has room for, by registers and shared memory.
    """

    tile_m: int = 128
    tile_n: int = 128
    warps_m: int = 2
    warps_n: int = 2
    row_bytes: int = 64
    stages: int = 4
    resident_ctas: int = 1

@dataclass(frozen=True)
class Sm80GemmConfig(Sm80Config):
    """Tunables of the dense GEMM by ``mma.sync``: those of `Sm80Config`, and three more.

    Attributes:
        group_m: as in `Sm100GemmConfig`.
        rounding: of float32 operands to TF32. ``"nearest"``: ties to even, as on other architectures; each CTA rounds
            what it has copied. ``"nearest_a"``: of ``a`` alone; ``b`` has to be TF32 already, and is truncated where it
            is not. ``"truncate"``: neither is rounded, and the tensor core ignores 13 bits of both: errors of up to one
            unit instead of half a unit in the last place of TF32, all toward zero.
        split_k: CTAs that share a tile, 1, 2, 4 or 8: each sums its slice of K, of blocks of 128 bytes as in
            `Sm90GemmConfig`, and the last one to arrive adds the sums of all, out of a workspace in global memory.
    """

    group_m: int = 8
    rounding: Tf32Rounding = "nearest"
    split_k: int = 1


@dataclass(frozen=True)
class Sm80PatchEmbedConfig(Sm80Config):
    """Tunables of the patch embed of rows by ``mma.sync``: those of `Sm80Config`, and one more.

    Attributes:
        epilogue: as in `Sm100PatchEmbedConfig`.
    """

    epilogue: EpilogueArithmetic = "f32"


@dataclass(frozen=True)
class Sm80ImagesConfig(Sm80Config):
    """Tunables of the kernel that reads patches out of images and multiplies by ``mma.sync``: those of `Sm80Config`.

    Rows of a tile are patches, columns features.

    Attributes:
        tile_images: images whose patches at one position are neighbouring rows: 8, so that eight rows of an accumulator
            add one row of the table, or 1.
        teams: groups of ``warps_m * warps_n`` warps of a CTA. Two take tiles of their own, so that one multiplies while
            the other stores, and all of the same features, whose weight stays in shared memory: it is copied once, and
            stages have patches alone.
    """

    tile_images: int = 8
    teams: int = 1


GemmConfig = Sm100GemmConfig | Sm90GemmConfig | Sm80GemmConfig
PatchEmbedConfig = Sm100PatchEmbedConfig | Sm100ResidentConfig | Sm90PatchEmbedConfig | Sm80PatchEmbedConfig
ImagesConfig = Sm100ImagesConfig | Sm90ImagesConfig | Sm90GatherConfig | Sm80ImagesConfig
Config = PatchEmbedConfig | GemmConfig | ImagesConfig
Problem = PatchEmbedProblem | PatchEmbedImagesProblem | GemmProblem
