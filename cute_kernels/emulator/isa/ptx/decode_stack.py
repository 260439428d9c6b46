"""The stack of a thread: alloca, stacksave and stackrestore as arithmetic on its pointer, a register.

Each function that is expanded has a pointer of its own, which begins as its caller's: what it allocates is free behind
it. The stack is a variable in local memory, whose end the loads and stores check. What has no room on it, or no bytes,
is `NOWHERE`: the program may ask for it, and must not access it.
"""

from dataclasses import replace

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode_functions import Call
from cute_kernels.emulator.isa.ptx.decode_scopes import make_tokens
from cute_kernels.emulator.isa.ptx.lexer import Token
from cute_kernels.emulator.isa.ptx.program import Variable

_MOST_ALIGNED, _ALIGNED = 256, 8  # bytes: the largest alignment, and the one of an alloca without
STACK = Variable("$stack", "local", _MOST_ALIGNED, 16 << 10)
"""The memory of the stack, which lies behind the other local variables."""
NOWHERE = 1 << 30  # addresses of local memory have 32 bits
"""Address in local memory of what alloca has no room for."""

_TYPE = "b64"
_OPCODES = ("alloca", "stacksave", "stackrestore")


def pointer(depth: int) -> str:
    """Name of the pointer's register in a function that so many others have called."""
    return f"%stack{depth}"


def with_pointer(call: Call, depth: int) -> Call:
    """A call at this depth that hands over the pointer."""
    function = replace(call.function, parameters=(*call.function.parameters, (pointer(depth + 1), _TYPE)))
    return replace(call, function=function, arguments=(*call.arguments, *make_tokens(call.line, pointer(depth))))


def is_of_stack(tokens: list[Token]) -> bool:
    """Whether a statement is one of these instructions."""
    return any(token.text.partition(".")[0] in _OPCODES for token in tokens[_guard(tokens) :][:1])


def _guard(tokens: list[Token]) -> int:
    """How many tokens the guard has."""
    return 0 if tokens[0].text != "@" else 3 if [token.text for token in tokens[1:2]] == ["!"] else 2


def expanded(tokens: list[Token], depth: int, spare: str, taken: str, none: str) -> list[list[Token]]:
    """Statements in place of one; ``spare``, ``taken`` and the predicate ``none`` are registers that nothing else uses.
    Raises UnsupportedPTX: other operands or types than those of 64-bit addresses."""
    start, line, stack = _guard(tokens), tokens[0].line, pointer(depth)
    guard, (opcode, *rest) = tokens[:start], tokens[start:]
    words = [token.text for token in rest if token.text != ","]
    name, _, type_ = opcode.text.partition(".")
    if type_ != "u64" and (type_ != "u32" or name == "alloca"):
        raise UnsupportedPTX(f"opcode {opcode.text!r} is not implemented", ptx_line=line, instruction=opcode.text)
    if len(words) not in ((2, 3) if name == "alloca" else (1,)):
        raise UnsupportedPTX(f"{name} takes one operand, alloca two or three", ptx_line=line)
    if name != "alloca":
        save = name == "stacksave"
        moved = (words[0], stack) if save else (stack, words[0])
        opcode = "mov.b64" if type_ == "u64" else "cvt.u32.u64" if save else "cvt.u64.u32"
        return [[*guard, *make_tokens(line, opcode, moved[0], ",", moved[1])]]
    align = words[2] if len(words) > 2 else str(_ALIGNED)
    if not align.isdecimal() or not 0 < int(align) <= _MOST_ALIGNED or int(align) & (int(align) - 1):
        message = f"alloca aligned to {align} bytes; powers of two up to {_MOST_ALIGNED} are possible"
        raise UnsupportedPTX(message, ptx_line=line)
    steps = (
        f"add.u64 {stack} , {stack} , {int(align) - 1}", f"and.b64 {stack} , {stack} , {2**64 - int(align)}",
        f"min.u64 {spare} , {stack} , {STACK.nbytes}", f"sub.u64 {spare} , {STACK.nbytes} , {spare}",  # the room
        f"sub.u64 {taken} , {words[1]} , 1", f"setp.ge.u64 {none} , {taken} , {spare}",
        f"mov.b64 {spare} , {STACK.name}", f"add.u64 {spare} , {spare} , {stack}",
        f"selp.b64 {taken} , 0 , {words[1]} , {none}", f"add.u64 {stack} , {stack} , {taken}",
        f"selp.b64 {words[0]} , {NOWHERE} , {spare} , {none}",
    )  # fmt: skip
    return [[*guard, *make_tokens(line, *step.split())] for step in steps]
