"""Relocatable ELF objects linked into this process: sections copied, relocations applied, code made executable.

What LLVM generates for a host function needs no more than this, and a stored kernel is loaded without importing CuTe
DSL, whose compiler is 200 MB. Formulas and numbers of relocations are those of the x86-64 psABI (section 4.4) and of
ELF for the Arm 64-bit Architecture (section 5.7).
"""

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

_IDENTIFICATION = b"\x7fELF\x02\x01"  # 64 bits, little-endian
# System V ABI: places in the file header; a section's header; a symbol; a relocation.
_MACHINE, _SECTIONS_PLACE, _SECTIONS_COUNT, _NAMES_INDEX = 0x12, 0x28, 0x3C, 0x3E
_SECTION, _SYMBOL, _RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
_SYMBOL_TABLE, _RELOCATIONS, _NO_BITS = 2, 4, 8  # sh_type
_LOADED, _EXECUTED, _THREAD_LOCAL = 0x2, 0x4, 0x400  # sh_flags
_UNDEFINED, _ABSOLUTE, _RESERVED = 0, 0xFFF1, 0xFF00  # st_shndx
_CONSTRUCTORS = (14, 15, 16)  # sh_type: functions that somebody would have to call
_PAGE = mmap.PAGESIZE
_JUMP_BYTES = 16


class LinkError(Exception):
    """Why an object cannot be linked."""


class _Section(NamedTuple):
    """A section's header."""

    name: int
    kind: int
    flags: int
    address: int
    place: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class _At(NamedTuple):
    """Terms of a relocation's formula, as the ABIs call them: what is at ``p`` gets symbol ``s`` plus ``a``.

    ``call`` is near enough for any relative call; ``entry`` is the symbol's in the global offset table, at ``table``.
    """

    p: int
    s: int
    a: int
    call: int
    entry: int
    table: int


def _page(address: int) -> int:
    return address & ~0xFFF


def _low(bits: int) -> Callable[[_At], int]:
    """The place in its 4 KB of what loads and stores of 2 ** bits bytes address."""
    return lambda at: (at.s + at.a & 0xFFF) >> bits


# kind -> (bits, signed, formula)
_WORDS: dict[int, dict[int, tuple[int, bool, Callable[[_At], int]]]] = {
    62: {
        1: (64, False, lambda at: at.s + at.a),  # R_X86_64_64
        2: (32, True, lambda at: at.call + at.a - at.p),  # PC32
        4: (32, True, lambda at: at.call + at.a - at.p),  # PLT32
        9: (32, True, lambda at: at.entry + at.a - at.p),  # GOTPCREL
        24: (64, True, lambda at: at.s + at.a - at.p),  # PC64
        25: (64, True, lambda at: at.s + at.a - at.table),  # GOTOFF64
        26: (32, True, lambda at: at.table + at.a - at.p),  # GOTPC32
        27: (64, True, lambda at: at.entry + at.a - at.table),  # GOT64
        28: (64, True, lambda at: at.entry + at.a - at.p),  # GOTPCREL64
        29: (64, True, lambda at: at.table + at.a - at.p),  # GOTPC64
        31: (64, True, lambda at: at.call + at.a - at.table),  # PLTOFF64
        41: (32, True, lambda at: at.entry + at.a - at.p),  # GOTPCRELX
        42: (32, True, lambda at: at.entry + at.a - at.p),  # REX_GOTPCRELX
    },
    183: {
        257: (64, False, lambda at: at.s + at.a),  # R_AARCH64_ABS64
        260: (64, True, lambda at: at.s + at.a - at.p),  # PREL64
        261: (32, True, lambda at: at.s + at.a - at.p),  # PREL32
    },
}
# Into instructions: kind -> ((first bit, bits of the field, first bit of the value)..., bits, signed, formula)
_Fields = tuple[tuple[int, int, int], ...]
_TWELVE: _Fields = ((10, 12, 0),)
_INSTRUCTIONS: dict[int, tuple[_Fields, int, bool, Callable[[_At], int]]] = {
    275: (((29, 2, 0), (5, 19, 2)), 21, True, lambda at: _page(at.s + at.a) - _page(at.p) >> 12),  # ADR_PREL_PG_HI21
    277: (_TWELVE, 12, False, _low(0)),  # ADD_ABS_LO12_NC
    278: (_TWELVE, 12, False, _low(0)),  # LDST8_ABS_LO12_NC
    282: (((0, 26, 0),), 26, True, lambda at: at.call + at.a - at.p >> 2),  # JUMP26
    283: (((0, 26, 0),), 26, True, lambda at: at.call + at.a - at.p >> 2),  # CALL26
    284: (_TWELVE, 12, False, _low(1)),  # LDST16_ABS_LO12_NC
    285: (_TWELVE, 12, False, _low(2)),  # LDST32_ABS_LO12_NC
    286: (_TWELVE, 12, False, _low(3)),  # LDST64_ABS_LO12_NC
    299: (_TWELVE, 12, False, _low(4)),  # LDST128_ABS_LO12_NC
}
# A jump to the address behind it, in 8 bytes, of each e_machine: jmp *2(%rip), nop; ldr x16, #8, br x16.
_JUMPS = {62: bytes.fromhex("ff25020000006690"), 183: bytes.fromhex("5000005800021fd6")}


class Linked:
    """An object in memory, which lives as long as this does. ``symbols``: addresses of what the object defines;
    ``memory``: all of it, code first."""

    def __init__(self, code: bytes, outside: Callable[[str], int | None]) -> None:
        """Links an object of x86-64 or aarch64; ``outside`` gives addresses of what it does not define, None if there
        is none. Raises LinkError: not such an object, a reference that nothing defines, or a relocation that is not
        known here."""
        self._code = code
        self._read_sections()
        self.symbols: dict[str, int] = {}
        places, executed, size = self._lay_out()
        self.memory = mmap.mmap(-1, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for index, place in places.items():
            section = self._sections[index]
            if section.kind != _NO_BITS:
                self.memory[place : place + section.size] = code[section.place : section.place + section.size]
        targets = list(self._targets(places, outside))
        for index, place in places.items():
            self._relocate(index, place, targets)
        self._protect(executed)

    def _read_sections(self) -> None:
        code = self._code
        if not code.startswith(_IDENTIFICATION) or len(code) < 64:
            raise LinkError(f"not a little-endian 64-bit ELF file: it begins with {code[:6]!r}")
        (self._machine,) = struct.unpack_from("<H", code, _MACHINE)
        if self._machine not in _JUMPS:
            raise LinkError(f"an ELF file for machine {self._machine}: must be x86-64 (62) and aarch64 (183)")
        (first,) = struct.unpack_from("<Q", code, _SECTIONS_PLACE)
        (count,) = struct.unpack_from("<H", code, _SECTIONS_COUNT)
        headers = _SECTION.iter_unpack(code[first : first + count * _SECTION.size])
        self._sections = list(map(_Section._make, headers))
        self._table = next((section for section in self._sections if section.kind == _SYMBOL_TABLE), None)
        if self._table is None:
            raise LinkError("an ELF file without a symbol table")
        if any(section.kind in _CONSTRUCTORS or section.flags & _THREAD_LOCAL for section in self._sections):
            raise LinkError("an ELF file with constructors or thread-local variables")
        self._count = self._table.size // _SYMBOL.size

    def _lay_out(self) -> tuple[dict[int, int], int, int]:
        """Places of loaded sections, bytes of code, behind which jumps stand, and of all, with the table of offsets."""
        (names,) = struct.unpack_from("<H", self._code, _NAMES_INDEX)
        loaded = [
            index
            for index, section in enumerate(self._sections)
            # Nothing is thrown through these functions: nobody reads their unwind tables.
            if section.flags & _LOADED and self._text(self._sections[names], section.name) != ".eh_frame"
        ]
        places: dict[int, int] = {}
        end = 0
        for flag in (_EXECUTED, 0):
            for index in loaded:
                section = self._sections[index]
                if section.flags & _EXECUTED == flag:
                    end = _aligned(end, section.alignment)
                    places[index], end = end, end + section.size
            if flag:
                self._jumps = _aligned(end, _JUMP_BYTES)
                end = executed = _aligned(self._jumps + self._count * _JUMP_BYTES, _PAGE)
        self._offsets = _aligned(end, 8)
        return places, executed, _aligned(self._offsets + self._count * 8, _PAGE)

    def _text(self, strings: _Section, offset: int) -> str:
        begin = strings.place + offset
        return self._code[begin : self._code.index(b"\0", begin)].decode()

    def _targets(
        self, places: dict[int, int], outside: Callable[[str], int | None]
    ) -> Iterator[tuple[str, int | None, int]]:
        """Name, address and near address of each symbol; what is outside gets a jump."""
        content = self._code[self._table.place : self._table.place + self._table.size]
        strings = self._sections[self._table.link]
        for number, (name, _, _, section, value, _) in enumerate(_SYMBOL.iter_unpack(content)):
            text = self._text(strings, name)
            near = None
            if section == _UNDEFINED:
                address = self._base + self._offsets if text == "_GLOBAL_OFFSET_TABLE_" else text and outside(text)
                if address and not self._base <= address < self._base + len(self.memory):
                    near = self._jump(number, address)
            elif section == _ABSOLUTE:
                address = value
            elif section < _RESERVED:
                address = self._base + places[section] + value if section in places else None
                if text and address is not None:
                    self.symbols[text] = address
            else:
                raise LinkError(f"symbol {text} of section {section:#x}")
            struct.pack_into("<Q", self.memory, self._offsets + 8 * number, address or 0)
            yield text, address or None, near or address or 0

    def _jump(self, number: int, address: int) -> int:
        place = self._jumps + number * _JUMP_BYTES
        self.memory[place : place + _JUMP_BYTES] = _JUMPS[self._machine] + struct.pack("<Q", address)
        return self._base + place

    def _relocate(self, index: int, place: int, targets: list[tuple[str, int | None, int]]) -> None:
        for table in self._sections:
            if table.kind != _RELOCATIONS or table.info != index:
                continue
            for offset, info, addend in _RELOCATION.iter_unpack(self._code[table.place : table.place + table.size]):
                name, address, near = targets[info >> 32]
                if address is None:
                    raise LinkError(f"nothing defines {name or 'a section that is not loaded'}")
                entry = self._base + self._offsets + 8 * (info >> 32)
                at = _At(self._base + place + offset, address, addend, near, entry, self._base + self._offsets)
                self._apply(info & 0xFFFFFFFF, place + offset, at)

    def _apply(self, kind: int, place: int, at: _At) -> None:
        if kind in _WORDS[self._machine]:
            bits, signed, formula = _WORDS[self._machine][kind]
            value = _fitting(formula(at), bits, signed, kind)
            self.memory[place : place + bits // 8] = value.to_bytes(bits // 8, "little")
        elif self._machine == 183 and kind in _INSTRUCTIONS:
            fields, bits, signed, formula = _INSTRUCTIONS[kind]
            value = _fitting(formula(at), bits, signed, kind)
            (word,) = struct.unpack_from("<I", self.memory, place)
            for first, width, low in fields:
                mask = (1 << width) - 1
                word = word & ~(mask << first) | (value >> low & mask) << first
            struct.pack_into("<I", self.memory, place, word)
        else:
            raise LinkError(f"relocation {kind} of machine {self._machine} is not known")

    def _protect(self, executed: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if self._machine == 183:  # caches of instructions do not see what was written as data
            ctypes.CDLL("libgcc_s.so.1").__clear_cache(
                ctypes.c_void_p(self._base), ctypes.c_void_p(self._base + executed)
            )
        permissions = mmap.PROT_READ | mmap.PROT_EXEC
        if library.mprotect(ctypes.c_void_p(self._base), ctypes.c_size_t(executed), permissions):
            raise LinkError(f"memory cannot be made executable: error {ctypes.get_errno()}")


def _aligned(number: int, alignment: int) -> int:
    return -(-number // max(alignment, 1)) * max(alignment, 1)


def _fitting(value: int, bits: int, signed: bool, kind: int) -> int:
    """The value in so many bits, two's complement."""
    low = -(1 << bits - 1) if signed else 0
    if not low <= value < low + (1 << bits):
        raise LinkError(f"relocation {kind}: {value:#x} does not fit into {bits} bits")
    return value & (1 << bits) - 1
