"""Tensor maps: the descriptors of tensors in global memory that the TMA unit copies boxes of.

A tensor map is 128 bytes, of which the first 64 carry the tiled mode (`TensorMap`) or the im2col mode (`Im2colMap`).
`decode` reads it; modes that are not implemented raise. Dimension 0 is the innermost one throughout, as in the tensor
map. The encoding and what is legal were taken from the CUDA driver's own encoder (tests/emulator/data) and from what
CuTe DSL's host code writes.
"""

import functools
import math
from dataclasses import dataclass

from cute_kernels.common.chips import MOST_SMEM_BYTES
from cute_kernels.emulator.errors import IllegalAccess, UnsupportedPTX

MAX_BOX_BYTES = MOST_SMEM_BYTES  # no CTA has more shared memory; the driver rejects larger boxes too
NBYTES = 128  # of a tensor map
CHUNK = 16  # bytes; the unit that swizzles move and that coordinates and rows must be multiples of

_TF32_FLAG = 1 << 4  # kept beside the 4-bit type code of the descriptor
#: Type code (with the TF32 flag as bit 4) -> (name, bytes per element).
DATA_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32_ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
    7 | _TF32_FLAG: ("tf32", 4),
    8 | _TF32_FLAG: ("tf32_ftz", 4),
}
GROUP = 16  # elements
UNIT = 128  # elements: rows and first coordinates of the padded types are whole ones


@dataclass(frozen=True)
class Packed:
    """A packed type: 16 elements of 4 or 6 bits side by side in global memory (PTX ISA, "Sub-byte Types").

    A load leaves in shared memory 8 bytes of ``b4x16``, 8 of ``b4x16_p64`` and 8 that hold nothing, 12 of ``b6x16_p32``
    and 4 that hold nothing. A store takes 8 bytes of ``b4x16``, and of ``b6x16_p32`` (``b6p2x16``) the low six bits of
    each of 16 bytes; of ``b4x16_p64`` there is none.

    An mbarrier counts the bytes without the padding: the PTX ISA does not say, CUTLASS's kernels announce so many.
    """

    code: int  # value of the type field of a tensor map
    name: str  # of the driver API, without its prefix
    bits: int  # of an element
    padding: int  # bytes behind 16 elements in shared memory

    @property
    def group_bytes(self) -> int:
        """Bytes of 16 elements in global memory."""
        return GROUP * self.bits // 8


PACKED = {
    "b4x16": Packed(11, "16U4_ALIGN8B", 4, 0),
    "b4x16_p64": Packed(12, "16U4_ALIGN16B", 4, 8),
    "b6x16_p32": Packed(13, "16U6_ALIGN16B", 6, 4),
}

_INTERLEAVES = {1: "16B", 2: "32B", 3: "reserved"}
_ELEMENT_BITS = {name: 8 * size for name, size in DATA_TYPES.values()} | {n: p.bits for n, p in PACKED.items()}
_TYPE_CODES = {name: code for code, (name, _) in DATA_TYPES.items()} | {n: p.code for n, p in PACKED.items()}
_TYPE_NAMES = {code: name for name, code in _TYPE_CODES.items()}


@dataclass(frozen=True)
class Swizzle:
    """``address ^= (address >> shift) & mask`` on absolute shared-memory addresses."""

    code: int  # value of the swizzle field of a tensor map
    atom: int  # value of its atom field (1: 32-byte atoms instead of 16-byte ones)
    span: int  # bytes of one row of the pattern; rows of a box lie this far apart
    shift: int
    mask: int


SWIZZLES = {
    "none": Swizzle(0, 0, 0, 0, 0),
    "32B": Swizzle(1, 0, 32, 3, 0x10),
    "64B": Swizzle(2, 0, 64, 3, 0x30),
    "128B": Swizzle(3, 0, 128, 3, 0x70),
    "128B_atom32B": Swizzle(3, 1, 128, 2, 0x60),
}
_SWIZZLE_NAMES = {(swizzle.code, swizzle.atom): name for name, swizzle in SWIZZLES.items()}

#: (first bit, bits) of each field of a map, whose first 64 bytes are a little-endian number; of what there is for each
#: dimension, that of the innermost one: the others follow, bits 32 to 35 of strides in `_STRIDES_ABOVE`.
_ADDRESS, _IM2COL, _RANK, _TYPE, _INTERLEAVE, _SWIZZLE = (0, 64), (64, 1), (68, 3), (71, 4), (75, 2), (77, 2)
_FILL, _TF32, _L2, _ATOM, _STRIDES, _STRIDES_ABOVE = (79, 1), (80, 1), (81, 2), (83, 2), (96, 32), (224, 4)
_EXTENTS, _STEPS, _BOX, _CORNERS, _PIXELS = (256, 32), (416, 3), (440, 8), (448, 16), (480, 10)
_CHANNELS = _BOX
# Bits 65 and 85 are set in every tiled map that CuTe DSL encodes and in none that the driver encodes for sm_90, which
# sm_90 executes alike.
_USED = sum(((1 << bits) - 1) << first for first, bits in (
    _ADDRESS, _IM2COL, _RANK, (71, 14), (65, 1), (85, 1), (96, 144), (256, 175), (440, 40),
))  # fmt: skip


def _field(content: int, field: tuple[int, int], dimension: int = 0) -> int:
    first, bits = field
    return content >> first + bits * dimension & (1 << bits) - 1


class _Geometry:
    """Geometry that both modes have: a tensor, and rows of consecutive elements that a copy moves."""

    @functools.cached_property
    def rank(self) -> int:
        return len(self.extents)

    @functools.cached_property
    def element_bits(self) -> int:
        """Bits of an element in global memory."""
        return _ELEMENT_BITS[self.dtype]

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many elements side by side in global memory."""
        return elements * self.element_bits // 8

    @functools.cached_property
    def padding(self) -> int:
        """Bytes behind 16 packed elements in shared memory."""
        return PACKED[self.dtype].padding if self.dtype in PACKED else 0

    @functools.cached_property
    def shared_pitch(self) -> int:
        """Bytes between rows in shared memory."""
        return SWIZZLES[self.swizzle].span or self.shared_bytes * self.row_bytes // self.box_bytes

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of one copy in shared memory, the padding between packed elements included."""
        if not self.padding:
            return self.box_bytes
        group = PACKED[self.dtype].group_bytes
        return self.box_bytes // group * (group + self.padding)

    def _check(self, least_rank: int, problems: list[tuple[object, str]]) -> None:
        """Raises IllegalAccess for ``problems`` and for what is illegal in both modes."""
        span = SWIZZLES[self.swizzle].span
        common = [
            (not least_rank <= self.rank <= 5, f"rank {self.rank}, legal are {least_rank} to 5"),
            (self.address % 16, f"global address {self.address:#x} is not 16-byte aligned"),
            (not 0 <= self.address < 1 << 63, f"global address {self.address:#x}, where no device has memory"),
            (any(not 1 <= extent <= 1 << 32 for extent in self.extents), f"extents {self.extents}, at most 2^32"),
            (
                any(stride % 16 or not 0 <= stride < 1 << 40 for stride in self.strides),
                f"strides {self.strides}, legal are multiples of 16 bytes below 2^40",
            ),
            (any(not 1 <= step <= 8 for step in self.element_strides), f"element strides {self.element_strides}"),
            (self.row_bytes % CHUNK, f"box rows of {self.row_bytes} bytes, legal are multiples of {CHUNK}"),
            (span and self.row_bytes > span, f"box rows of {self.row_bytes} bytes in a swizzle span of {span}"),
            (self.shared_bytes > MAX_BOX_BYTES, f"a copy of {self.shared_bytes} bytes, at most {MAX_BOX_BYTES}"),
            (self.nan_fill and self.dtype[0] in "usb" and self.dtype != "bf16", f"NaN fill of {self.dtype} elements"),
        ]
        if self.dtype in PACKED:
            common += self._packed_problems(PACKED[self.dtype].name)
        for wrong, text in (*common[:5], *problems, *common[5:]):
            if wrong:
                raise IllegalAccess(f"illegal tensor map: {text}")

    def _packed_problems(self, name: str) -> list[tuple[object, str]]:
        """(whether it is violated, problem) of rules for packed elements (CUDA driver API, cuTensorMapEncodeTiled)."""
        extent, row = self.extents[0], self.row_bytes * 8 // self.element_bits
        if not self.padding:
            return [(extent % 2, f"extent {extent} of {name} elements, legal are multiples of 2")]
        return [
            (extent % UNIT, f"extent {extent} of {name} elements, legal are multiples of {UNIT}"),
            (row != UNIT, f"box rows of {row} {name} elements, legal are {UNIT}"),
            (self.address % 32, f"global address {self.address:#x} of {name} elements is not 32-byte aligned"),
            (any(n % 32 for n in self.strides), f"strides {self.strides} of {name} elements, legal: multiples of 32"),
            (self.swizzle in ("32B", "64B"), f"swizzle {self.swizzle} of {name} elements, legal are none and 128B"),
        ]


@dataclass(frozen=True)
class TensorMap(_Geometry):
    """A decoded tensor map of a tiled tensor.

    Attributes:
        address: global address of element 0.
        dtype: element type, a name of `DATA_TYPES`, or of `PACKED`.
        extents: elements per dimension, innermost first.
        strides: bytes between elements of dimensions 1.. (dimension 0 is contiguous).
        box: extent of one copy per dimension, in elements of the tensor.
        element_strides: of dimension i, every element_strides[i]-th element of the box is copied (dimension 0: all).
        swizzle: a name of `SWIZZLES`.
        nan_fill: whether out-of-bounds elements read as NaN instead of zero.
        l2_promotion: code 0..3; no effect on results.

    Raises:
        IllegalAccess: a combination that the driver's encoder rejects.
    """

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    nan_fill: bool = False
    l2_promotion: int = 0

    def __post_init__(self) -> None:
        self._check(1, [(any(not 1 <= size <= 256 for size in self.box), f"box {self.box}, legal are 1 to 256")])

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one box row (dimension 0)."""
        return self.bytes_of(self.box[0])

    @functools.cached_property
    def tile(self) -> tuple[int, ...]:
        """Elements per dimension that one copy moves: the box thinned by the element strides."""
        return (self.box[0], *(-(-b // e) for b, e in zip(self.box[1:], self.element_strides[1:], strict=True)))

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes of one copy, those out of bounds included: what the mbarrier counts."""
        return self.bytes_of(math.prod(self.tile))


#: Rank -> bits of each corner of the box of pixels (PTX ISA, "im2col mode", "Bounding Box").
_CORNER_BITS = {3: 16, 4: 8, 5: 5}


@dataclass(frozen=True)
class Im2colMap(_Geometry):
    """A decoded tensor map in im2col mode: of a tensor NWC, NHWC or NDHWC, the pixels of a convolution.

    A copy moves ``channels`` consecutive elements of ``pixels`` pixels. The first pixel is given by the coordinates of
    the copy. Along W, then H, then D, the next one is an element stride further, up to the last position of the
    bounding box; then the dimension starts again from the first position of the box, and the next dimension advances;
    after the last one of the box the next image (N) follows. The offsets of the copy are added to all positions.
    Copies along W alone (``.im2col::w``, ``.im2col::w::128``) take the same maps, and of the box only what is of W.

    Attributes:
        address: global address of element 0.
        dtype: element type, a name of `DATA_TYPES`.
        extents: elements per dimension: C, W, (H, (D,)) N.
        strides: bytes between elements of dimensions 1.. (channels are contiguous).
        lower_corner: first position of the bounding box per dimension W, (H, (D)); negative with padding.
        upper_corner: its last position, relative to the last element of the dimension.
        channels: elements per pixel that a copy moves, 1 to 256, whole 16 bytes.
        pixels: per copy, 1 to 1024.
        element_strides: steps along W, (H, (D)); those of C and N are 1.
        swizzle, nan_fill, l2_promotion: as in `TensorMap`.

    Raises:
        IllegalAccess: a combination that the driver's documentation rules out.
        UnsupportedPTX: an element stride of C or N.
    """

    address: int
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    lower_corner: tuple[int, ...]
    upper_corner: tuple[int, ...]
    channels: int
    pixels: int
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    nan_fill: bool = False
    l2_promotion: int = 0

    def __post_init__(self) -> None:
        corners = (*self.lower_corner, *self.upper_corner)
        limit = 1 << (_CORNER_BITS.get(self.rank, 16) - 1)
        problems = [
            (len(corners) != 2 * (self.rank - 2), f"{len(corners)} coordinates of corners for rank {self.rank}"),
            (
                any(not -limit <= c < limit for c in corners),
                f"corners {self.lower_corner} and {self.upper_corner}, legal are {-limit} to {limit - 1}",
            ),
            (min(self.box, default=1) < 1, f"an empty bounding box: {self.box} positions"),
            (not 1 <= self.channels <= 256, f"{self.channels} channels per pixel, legal are 1 to 256"),
            (not 1 <= self.pixels <= 1024, f"{self.pixels} pixels per column, legal are 1 to 1024"),
        ]
        self._check(3, problems)
        if self.element_strides[0] != 1 or self.element_strides[-1] != 1:
            raise UnsupportedPTX(f"im2col map with element strides {self.element_strides}: those of C and N are 1")

    @functools.cached_property
    def box(self) -> tuple[int, ...]:
        """Positions of the bounding box per spatial dimension, steps of 1."""
        spatial = zip(self.extents[1:-1], self.lower_corner, self.upper_corner)
        return tuple(extent + upper - lower for extent, lower, upper in spatial)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one pixel."""
        return self.bytes_of(self.channels)

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes of one copy, those out of bounds included: what the mbarrier counts."""
        return self.pixels * self.row_bytes


def encode(tensor_map: TensorMap | Im2colMap) -> bytes:
    """The 128 bytes of a tensor map, as the driver encodes them for sm_90.

    For the im2col mode that is how CuTe DSL's host code encodes it, without the bits that the driver leaves clear.
    """
    code, swizzle = _TYPE_CODES[tensor_map.dtype], SWIZZLES[tensor_map.swizzle]
    im2col = isinstance(tensor_map, Im2colMap)
    values = [
        (_ADDRESS, tensor_map.address), (_IM2COL, im2col), (_RANK, tensor_map.rank - 1), (_TYPE, code & 15),
        (_TF32, code >> 4), (_SWIZZLE, swizzle.code), (_ATOM, swizzle.atom), (_FILL, tensor_map.nan_fill),
        (_L2, tensor_map.l2_promotion), (_STRIDES, *(stride >> 4 & 0xFFFFFFFF for stride in tensor_map.strides)),
        (_STRIDES_ABOVE, *(stride >> 36 for stride in tensor_map.strides)),
        (_EXTENTS, *(extent - 1 for extent in tensor_map.extents)),
        (_STEPS, *(step - 1 for step in tensor_map.element_strides)),
    ]  # fmt: skip
    if im2col:
        bits = _CORNER_BITS[tensor_map.rank]
        corners = [
            sum((c & (1 << bits) - 1) << bits * i for i, c in enumerate(corner))
            for corner in (tensor_map.lower_corner, tensor_map.upper_corner)
        ]
        values += (_CHANNELS, tensor_map.channels - 1), (_CORNERS, *corners), (_PIXELS, tensor_map.pixels - 1)
    else:
        values.append((_BOX, *(size - 1 for size in tensor_map.box)))
    content = sum(value << first + bits * i for (first, bits), *row in values for i, value in enumerate(row))
    return content.to_bytes(NBYTES, "little")


#: Field of tensormap.replace -> its largest ordinal, 0 for fields that occur once.
REPLACEABLE = {
    **dict.fromkeys(("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"), 0),
    "swizzle_atomicity": 0,
    **dict.fromkeys(("box_dim", "global_dim", "element_stride"), 4),
    "global_stride": 3,
}
_REPLACED = {
    "global_address": _ADDRESS, "rank": _RANK, "interleave_layout": _INTERLEAVE, "swizzle_mode": _SWIZZLE,
    "swizzle_atomicity": _ATOM, "fill_mode": _FILL, "box_dim": _BOX, "element_stride": _STEPS,
}  # fmt: skip
#: Values of .elemtype (PTX ISA, tensormap.replace) -> type.
_ELEMENT_NAMES = (*(name for name, _ in DATA_TYPES.values()), *PACKED)


def replace(data: bytes, name: str, ordinal: int, value: int) -> bytes:
    """tensormap.replace.tile: the 128 bytes with one field changed. Whether they make sense shows when they are used.

    Args:
        data: a tensor map.
        name: a key of `REPLACEABLE`.
        ordinal: dimension, 0 is the innermost; of strides, 0 is that of dimension 1.
        value: as the PTX ISA encodes it: the rank minus one, strides in bytes, codes of the enumerations.

    Raises:
        IllegalAccess: a value that does not fit its field.
        UnsupportedPTX: an element type or mode that is not implemented.
    """
    if name == "elemtype":
        if value >= len(_ELEMENT_NAMES):
            raise UnsupportedPTX(f"tensormap.replace.elemtype {value}")
        code = _TYPE_CODES[_ELEMENT_NAMES[value]]
        parts = [(_TYPE, code & 15), (_TF32, code >> 4)]
    elif name == "global_stride":
        if value % 16:
            raise IllegalAccess(f"tensormap.replace.global_stride {value}: no multiple of 16 bytes")
        parts = [(_STRIDES, value >> 4 & 0xFFFFFFFF), (_STRIDES_ABOVE, value >> 36)]
    elif name == "global_dim":
        parts = [(_EXTENTS, value - 1 & 0xFFFFFFFF)]
    else:
        parts = [(_REPLACED[name], value - (name in ("box_dim", "element_stride")))]
    content = int.from_bytes(data, "little")
    for (first, bits), part in parts:
        if not 0 <= part < 1 << bits:
            raise IllegalAccess(f"tensormap.replace.{name} with value {value:#x}")
        first += bits * ordinal
        content = content & ~(((1 << bits) - 1) << first) | part << first
    return content.to_bytes(NBYTES, "little")


def decode(data: bytes) -> TensorMap | Im2colMap:
    """Decodes a tensor map of 128 bytes. Raises UnsupportedPTX: a data type or mode that is not implemented
    (interleaved); IllegalAccess: not 128 bytes, or contents that no encoder produces."""
    if len(data) != 128:
        raise IllegalAccess(f"a tensor map has 128 bytes, not {len(data)}")
    return _decode(bytes(data[:64]))  # CuTe DSL leaves the second half uninitialised


@functools.lru_cache(maxsize=256)
def _decode(data: bytes) -> TensorMap | Im2colMap:
    content = int.from_bytes(data, "little")
    im2col = _field(content, _IM2COL)
    if content & ~(_USED | im2col * (1023 << _PIXELS[0])):
        raise UnsupportedPTX(f"tensor map in a mode that is not implemented: {data.hex()}")
    code = _field(content, _TYPE) | _field(content, _TF32) * _TF32_FLAG
    swizzle, layout = (_field(content, _SWIZZLE), _field(content, _ATOM)), _field(content, _INTERLEAVE)
    if code not in _TYPE_NAMES or code not in DATA_TYPES and im2col:
        raise UnsupportedPTX(f"tensor map with data type code {code}{' in im2col mode' * im2col}")
    if layout:
        raise UnsupportedPTX(f"tensor map with interleaved layout {layout} ({_INTERLEAVES[layout]})")
    if swizzle not in _SWIZZLE_NAMES:
        raise UnsupportedPTX(f"tensor map with swizzle {swizzle[0]}, atom {swizzle[1]}")
    rank = _field(content, _RANK) + 1
    if rank > 5:
        raise UnsupportedPTX(f"tensor map of rank {rank}")
    strides = (_field(content, _STRIDES, i) | _field(content, _STRIDES_ABOVE, i) << 32 for i in range(rank - 1))
    common = {
        "address": _field(content, _ADDRESS),
        "dtype": _TYPE_NAMES[code],
        "extents": tuple(_field(content, _EXTENTS, i) + 1 for i in range(rank)),
        "strides": tuple(stride << 4 for stride in strides),
        "element_strides": tuple(_field(content, _STEPS, i) + 1 for i in range(rank)),
        "swizzle": _SWIZZLE_NAMES[swizzle],
        "nan_fill": bool(_field(content, _FILL)),
        "l2_promotion": _field(content, _L2),
    }
    if not im2col:
        return TensorMap(box=tuple(_field(content, _BOX, i) + 1 for i in range(rank)), **common)
    bits = _CORNER_BITS.get(rank)
    if bits is None:
        raise UnsupportedPTX(f"im2col tensor map of rank {rank}")
    lower, upper = (
        tuple(_signed(_field(content, _CORNERS, half) >> bits * i, bits) for i in range(rank - 2)) for half in (0, 1)
    )
    channels, pixels = _field(content, _CHANNELS) + 1, _field(content, _PIXELS) + 1
    return Im2colMap(lower_corner=lower, upper_corner=upper, channels=channels, pixels=pixels, **common)


def _signed(field: int, bits: int) -> int:
    """The low ``bits`` of a field as two's complement."""
    sign = 1 << (bits - 1)
    return (field & (2 * sign - 1) ^ sign) - sign
