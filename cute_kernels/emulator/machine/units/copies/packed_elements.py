"""Tensor maps of packed elements: 16 elements of 4 or 6 bits side by side in global memory (PTX ISA, "Sub-byte Types").

=============  =====================  ==========================================  =================================
type           CUtensorMapDataType    load: 16 elements in shared memory          store: 16 elements in shared memory
=============  =====================  ==========================================  =================================
``b4x16``      16U4_ALIGN8B           8 bytes, as they are                        8 bytes, as they are
``b4x16_p64``  16U4_ALIGN16B          8 bytes, then 8 bytes that hold nothing     does not exist
``b6x16_p32``  16U6_ALIGN16B          12 bytes, then 4 bytes that hold nothing    ``b6p2x16``: 16 bytes, the low six
                                                                                  bits of each
=============  =====================  ==========================================  =================================

An mbarrier counts the bytes without the padding: the PTX ISA does not say, CUTLASS's kernels announce so many.
"""

from dataclasses import dataclass

GROUP = 16  # elements
UNIT = 128  # elements: rows and first coordinates of the padded types are whole ones


@dataclass(frozen=True)
class Packed:
    """A packed type."""

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
