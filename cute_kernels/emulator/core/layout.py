"""The structures and functions of the core's headers as ctypes has them.

The headers are the only place where they are declared. What is made of them here is compared with the C compiler's view
when the core is built (`assertions`).
"""

import ctypes
import re
from pathlib import Path

FOLDER = Path(__file__).parent
CType = type
"""A type of `ctypes`."""

_TYPES: dict[str, CType | None] = {
    "void": None, "int8_t": ctypes.c_int8, "uint8_t": ctypes.c_uint8, "int16_t": ctypes.c_int16,
    "uint16_t": ctypes.c_uint16, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64, "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip
_INCLUDE = re.compile(r'#include\s+"(.*?)"')
_ENUM = re.compile(r"enum\s*\{([^}]*)\}\s*;")
_STRUCT = re.compile(r"struct\s+(\w+)\s*\{([^}]*)\}\s*(?:\1\s*)?;")
_FUNCTION_POINTER = re.compile(r"[\w\s*]+\(\s*\*\s*(\w+)\s*\)\s*\(.*\)", re.S)
_MEMBERS = re.compile(r"(?:const\s+)?(\w+)\b(.*)", re.S)
_MEMBER = re.compile(r"(\**)\s*(\w+)\s*(\[\s*(\w*)\s*\])?")
_FUNCTION = re.compile(r"EXPORT\s+([\w\s]+?)(\s*\**\s*)(\w+)\s*\(([^)]*)\)\s*;")


def _source(name: str) -> str:
    """A header without comments, with the headers of the core that it includes in their places."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", (FOLDER / name).read_text(), flags=re.S)
    return _INCLUDE.sub(lambda found: _source(found[1]), text)


def _constants(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for body in _ENUM.findall(text):
        following = 0
        for item in filter(None, map(str.strip, body.split(","))):
            name, _, value = map(str.strip, item.partition("="))
            found[name] = (found[value] if value in found else int(value, 0)) if value else following
            following = found[name] + 1
    return found


def _fields(body: str, known: dict[str, CType | None], constants: dict[str, int]) -> list[tuple[str, CType]]:
    fields: list[tuple[str, CType]] = []
    for statement in filter(None, map(str.strip, body.split(";"))):
        function = _FUNCTION_POINTER.fullmatch(statement)
        if function:
            fields.append((function[1], ctypes.c_void_p))
            continue
        type_name, names = _MEMBERS.fullmatch(statement).groups()
        for declarator in names.split(","):
            member = _MEMBER.fullmatch(declarator.strip())
            if member is None or not (member[1] or type_name in known):
                raise ValueError(f"state.h: {declarator.strip()!r} of {statement!r} is not understood")
            stars, name, array, length = member.groups()
            kind = ctypes.c_void_p if stars else known[type_name]
            if array:
                kind *= 0 if not length else constants[length] if length in constants else int(length, 0)
            fields.append((name, kind))
    return fields


def _structures(text: str, constants: dict[str, int]) -> dict[str, type[ctypes.Structure]]:
    known: dict[str, CType | None] = dict(_TYPES)
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(text):
        fields = _fields(body, known, constants)
        found[name] = known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def _type(text: str, structures: dict[str, type[ctypes.Structure]]) -> CType | None:
    """ctypes type of a parameter or a result: pointers as addresses."""
    if "*" in text:
        return ctypes.c_void_p
    return _TYPES[text.replace("const", "").split()[0]]


def _functions(text: str, structures: dict[str, type[ctypes.Structure]]) -> dict[str, tuple[CType | None, ...]]:
    found = {}
    for result, stars, name, parameters in _FUNCTION.findall(text):
        types = [part for part in map(str.strip, parameters.split(",")) if part != "void"]
        found[name] = (_type(result + stars, structures), *(_type(part, structures) for part in types))
    return found


#: Integer constants by name.
CONSTANTS: dict[str, int] = _constants(_source("state.h"))
#: Structures by name.
STRUCTURES: dict[str, type[ctypes.Structure]] = _structures(_source("state.h"), CONSTANTS)
#: Exported functions by name: type of the result, types of the arguments; addresses for pointers.
FUNCTIONS: dict[str, tuple[CType | None, ...]] = _functions(_source("core.h"), STRUCTURES)


def assertions() -> str:
    """C source that compiles only where every structure is laid out as here."""
    lines = ["#include <stddef.h>", '#include "state.h"']
    for name, structure in STRUCTURES.items():
        facts = [(f"sizeof({name})", ctypes.sizeof(structure))]
        facts += [(f"offsetof({name}, {field})", getattr(structure, field).offset) for field, *_ in structure._fields_]
        lines += [f'_Static_assert({what} == {value}, "{name}");' for what, value in facts]
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in CONSTANTS.items()]
    return "\n".join(lines) + "\n"


def words(name: str) -> dict[str, int]:
    """Index of the first word of each member of a structure of 64-bit words. Raises ValueError: there are members that
    do not begin at a word."""
    structure = STRUCTURES[name]
    offsets = {field: getattr(structure, field).offset for field, *_ in structure._fields_}
    if ctypes.sizeof(structure) % 8 or any(offset % 8 for offset in offsets.values()):
        raise ValueError(f"{name} has members that are not words of 64 bits")
    return {field: offset // 8 for field, offset in offsets.items()}


def word_count(name: str) -> int:
    """Words of 64 bits of a structure."""
    return ctypes.sizeof(STRUCTURES[name]) // 8
