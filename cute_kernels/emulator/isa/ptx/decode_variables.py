"""Declarations of variables."""

from cute_kernels.common.chips import MOST_SMEM_BYTES
from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.lexer import Reader
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Variable

_MOST_ALIGNED = 1 << 24
"""Bytes: shared addresses of a CTA have 24 bits here."""
MOST_BYTES = {"shared": MOST_SMEM_BYTES, "const": 64 << 10, "local": 512 << 10, "global": 1 << 40}
"""Most bytes of a variable by state space: of a CTA (CUDA programming guide), of all constants, of a thread;
more than any device has."""

_OPAQUE = ("texref", "samplerref", "surfref")


def read_variable(reader: Reader) -> Variable:
    """A variable declaration, from its state space on."""
    line = reader.line()
    space = reader.take().text[1:]
    if space not in MOST_BYTES:
        raise UnsupportedPTX(f".{space} declarations are not supported", ptx_line=line)
    align = None
    while reader.peek() in (".align", ".attribute"):
        if reader.take().text == ".attribute":
            reader.take_until(")")  # .managed, .unified: there is one memory
            continue
        align = reader.take_number()
        if not 0 < align <= _MOST_ALIGNED or align & (align - 1):
            message = f".align {align}: must be a power of two up to {_MOST_ALIGNED}"
            raise UnsupportedPTX(message, ptx_line=line)
    element = reader.take().text[1:]
    if element in _OPAQUE:
        (name, *_) = reader.take_until(";")
        return Variable(name.text, space, 1, 0, refused=f"a variable of type .{element}")
    if element not in TYPE_BITS:
        raise UnsupportedPTX(f"variables of type .{element} are not supported", ptx_line=line)
    size = TYPE_BITS[element] // 8
    name = reader.take().text
    count = 1
    while reader.peek() == "[":
        reader.take()
        count *= reader.take_number() if reader.peek() != "]" else 0
        reader.take("]")
    initial, named = b"", ()
    if reader.peek() == "=":
        reader.take()
        initial, named = _initialiser(reader, size)
    reader.take(";")
    nbytes = size * count or len(initial)
    if len(initial) > nbytes:
        raise UnsupportedPTX(f"{name} has {nbytes} bytes and an initialiser of {len(initial)}", ptx_line=line)
    if nbytes > MOST_BYTES[space]:
        message = f"the .{space} variable {name} is larger than {MOST_BYTES[space]} bytes"
        raise UnsupportedPTX(message, ptx_line=line)
    return Variable(name, space, align or size, nbytes, initial, named=named)


def _initialiser(reader: Reader, size: int) -> tuple[bytes, tuple[tuple[int, str, int], ...]]:
    """Bytes, and (offset, name, bytes behind it) of addresses of variables and functions among them."""
    values, braces, named = [], reader.peek() == "{", []
    line = reader.line()
    if braces:
        reader.take()
    while True:
        sign = -1 if reader.peek() == "-" else 1
        if sign < 0:
            reader.take()
        token = reader.tokens[min(reader.at, len(reader.tokens) - 1)]
        if token.kind == "name" and size == 8:
            named.append((size * len(values), *_address(reader)))
            values.append(0)
        elif token.kind == "float":
            reader.take()
            values.append(int(token.text[2:], 16) ^ (1 << 8 * size - 1) * (sign < 0))
        else:
            values.append(sign * reader.take_number())
        if reader.peek() != ",":
            break
        reader.take()
    if braces:
        if reader.peek() != "}":
            raise UnsupportedPTX("initialisers other than numbers are not supported", ptx_line=line)
        reader.take("}")
    return b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in values), tuple(named)


def _address(reader: Reader) -> tuple[str, int]:
    """``name``, ``name+4`` or ``generic(name)``: all have the same generic address."""
    name = reader.take().text
    if name == "generic":
        reader.take("(")
        name = reader.take().text
        reader.take(")")
    offset = 0
    if reader.peek() == "+":
        reader.take()
        offset = reader.take_number()
    return name, offset
