"""Relocatable ELF objects whose references to outside functions are bound before anything links them.

A section is added with a jump for each function, and the object's symbols name these jumps. So whoever links the object
afterwards, CuTe DSL's own engine, has it call our functions where it named the CUDA runtime's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

_IDENTIFICATION = b"\x7fELF\x02\x01"  # 64 bits, little-endian
# System V ABI: places in the file header; a section's header; a symbol.
_MACHINE, _SECTIONS_PLACE, _SECTIONS_COUNT = 0x12, 0x28, 0x3C  # e_machine, e_shoff, e_shnum
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_PROGRAM, _SYMBOL_TABLE = 1, 2  # SHT_PROGBITS, SHT_SYMTAB
_LOADED_AND_EXECUTED, _UNDEFINED, _GLOBAL_FUNCTION = 0x6, 0, 1 << 4 | 2  # SHF_ALLOC | SHF_EXECINSTR, SHN_UNDEF
# A jump to the address behind it, in 8 bytes, of each e_machine: jmp *2(%rip), nop; ldr x16, #8, br x16.
_JUMPS = {62: bytes.fromhex("ff25020000006690"), 183: bytes.fromhex("5000005800021fd6")}
_JUMP_BYTES = 16


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


def with_functions(code: bytes, addresses: Mapping[str, int]) -> bytes:
    """The object with each undefined symbol that ``addresses`` names defined, as a jump to that address.

    Raises:
        ValueError: not a little-endian 64-bit ELF file for x86-64 or aarch64 with a symbol table.
    """
    if not code.startswith(_IDENTIFICATION):
        raise ValueError(f"not a little-endian 64-bit ELF file: it begins with {code[:6]!r}")
    (machine,) = struct.unpack_from("<H", code, _MACHINE)
    (first,) = struct.unpack_from("<Q", code, _SECTIONS_PLACE)
    (count,) = struct.unpack_from("<H", code, _SECTIONS_COUNT)
    if machine not in _JUMPS:
        raise ValueError(f"an ELF file for machine {machine}; allowed: x86-64 (62) and aarch64 (183)")
    headers = code[first : first + count * _SECTION.size]
    sections = list(map(_Section._make, _SECTION.iter_unpack(headers)))
    table = next((section for section in sections if section.kind == _SYMBOL_TABLE), None)
    if table is None:
        raise ValueError("an ELF file without a symbol table")

    changed, jumps = bytearray(code), b""
    for place in range(table.place, table.place + table.size, table.entry):
        name, _, other, section, _, _ = _SYMBOL.unpack_from(code, place)
        begin = sections[table.link].place + name
        address = addresses.get(code[begin : code.index(b"\0", begin)].decode())
        if section == _UNDEFINED and address is not None:
            _SYMBOL.pack_into(changed, place, name, _GLOBAL_FUNCTION, other, count, len(jumps), _JUMP_BYTES)
            jumps += _JUMPS[machine] + struct.pack("<Q", address)

    changed += bytes(-len(changed) % _JUMP_BYTES)
    added = _Section(0, _PROGRAM, _LOADED_AND_EXECUTED, 0, len(changed), len(jumps), 0, 0, _JUMP_BYTES, 0)
    changed += jumps
    struct.pack_into("<Q", changed, _SECTIONS_PLACE, len(changed))
    struct.pack_into("<H", changed, _SECTIONS_COUNT, count + 1)
    return bytes(changed + headers + _SECTION.pack(*added))
