"""PTX text to typed instructions: the declarations of a module; bodies of kernels are read by `decode_body`."""

import functools
from dataclasses import replace

from cute_kernels.emulator.errors import UnsupportedPTX
from cute_kernels.emulator.isa.ptx.decode_body import Body
from cute_kernels.emulator.isa.ptx.decode_functions import Function, Functions, read_function, take_within
from cute_kernels.emulator.isa.ptx.decode_variables import read_variable
from cute_kernels.emulator.isa.ptx.lexer import Reader, Token, integer, tokenize
from cute_kernels.emulator.isa.ptx.program import TYPE_BITS, Kernel, Kernels, Module, Parameter, Variable
from cute_kernels.emulator.isa.ptx.source_lines import unquoted
from cute_kernels.emulator.isa.ptx.targets import read_head

_MOST_PARAMETER_BYTES = 32764  # of a kernel (CUDA driver API, since compute capability 7.0)
_LINKING = (".visible", ".extern", ".weak", ".common")
_DECLARATIONS = (*_LINKING, ".entry", ".func", ".shared", ".global", ".const")


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """Decodes a PTX module (cached by its text); its kernels are decoded when they are looked up. Raises
    UnsupportedPTX: a construct that is not read here."""
    reader = Reader(tokenize(text))
    version, target = read_head(reader)
    variables: list[Variable] = []
    files: dict[int, str] = {}
    entries: dict[str, list[Token]] = {}
    functions: dict[str, Function] = {}
    aliases: list[list[Token]] = []
    defined: set[str] = set()
    while reader.peek():
        token = reader.take()
        if token.text == ".file":
            number, name, *_ = reader.take_rest_of_line(least=2)
            files[integer(number.text, number.line)] = unquoted(name.text)
        elif token.text == ".section":
            reader.take_until("{")  # of data for debuggers alone
            reader.at -= 1
            take_within(reader)
        elif token.text == ".pragma":
            reader.take_until(";")
        elif token.text == ".alias":
            aliases.append(reader.take_until(";"))
        elif token.text in _DECLARATIONS:
            reader.at -= 1
            item = _declaration(reader)
            if item is None:
                continue
            name = item[0].text if isinstance(item, list) else item.name
            if token.text != ".extern" and name in defined:
                raise UnsupportedPTX(f"{name!r} is declared twice", ptx_line=token.line)
            defined.update([name] * (token.text != ".extern"))
            if isinstance(item, Variable):
                variables.append(item)
            elif isinstance(item, Function):
                functions[name] = item
            else:
                entries[name] = item
        else:
            raise UnsupportedPTX(f"{token.text!r} at module level is not supported", ptx_line=token.line)
    for name, _, meant in (alias for alias in aliases if len(alias) == 3):
        if meant.text in functions:
            functions[name.text] = functions[meant.text]

    texts = [*entries.values(), *(function.body for function in functions.values())]
    known = Functions(functions, texts, [name for each in variables for _, name, _ in each.named])
    variables = [_with_functions(each, known) for each in variables]

    def decode(name: str) -> Kernel:
        """After the loop: functions, and LLVM's .file table, may stand behind the code."""
        code = Reader(entries[name])
        body = _entry(code, files)
        body.read(code, known, "alloca." in text)
        return body.finish(tuple(variables))

    return Module(target, version, Kernels(entries, decode), tuple(variables))


def _with_functions(variable: Variable, functions: Functions) -> Variable:
    """Addresses of functions are known; those of variables are when a launch gives them memory."""
    initial = bytearray(variable.initial)
    for offset, name, more in variable.named:
        if name in functions.addresses:
            initial[offset : offset + 8] = (functions.addresses[name] + more).to_bytes(8, "little")
    named = tuple(each for each in variable.named if each[1] not in functions.addresses)
    return replace(variable, initial=bytes(initial), named=named)


def _declaration(reader: Reader) -> Variable | Function | list[Token] | None:
    """Declarations of a directive of the module; an entry keeps its tokens, from its name on."""
    while reader.peek() in _LINKING:
        reader.take()
    if reader.peek() == ".entry":
        reader.take()
        head = reader.take_until("{")
        reader.at -= 1
        return head + take_within(reader)
    if reader.peek() == ".func":
        return read_function(reader)  # of others than those of the module, the call says whether they are known
    return read_variable(reader)


def _entry(reader: Reader, files: dict[int, str]) -> Body:
    body = Body(reader.take().text, files)
    if reader.peek() == "(":
        reader.take()
        while reader.peek() != ")":
            body.parameters.append(_parameter(reader, body.parameters))
            if reader.peek() == ",":
                reader.take()
        reader.take(")")
    while reader.peek() != "{":
        token = reader.take()
        if token.text == ".reqntid":
            body.reqntid = reader.take_triple()
        elif token.text == ".reqnctapercluster":
            body.reqnctapercluster = reader.take_triple()
        elif token.text == ".maxntid":
            x, y, z = reader.take_triple()
            body.most_threads = x * y * z
        elif token.text == ".maxnreg":
            body.most_registers, _, _ = reader.take_triple()
        elif token.text == ".minnctapersm":
            body.ctas_per_sm, _, _ = reader.take_triple()
        elif token.text == ".maxclusterrank":
            reader.take_triple()
        elif token.text in (".explicitcluster", ".blocksareclusters"):
            if token.text == ".blocksareclusters":
                raise UnsupportedPTX(".blocksareclusters is not supported", ptx_line=token.line)
        else:
            raise UnsupportedPTX(f"{token.text!r} is not a known directive of an entry", ptx_line=token.line)
    return body


def _parameter(reader: Reader, before: list[Parameter]) -> Parameter:
    line = reader.line()
    reader.take(".param")
    align = None
    element = ""
    pointer = False
    while reader.peek().startswith("."):
        directive = reader.take().text
        pointer = pointer or directive == ".ptr"
        if directive == ".align":
            number = reader.take_number()
            if number <= 0 or number & (number - 1):
                raise UnsupportedPTX(f".align {number} of a parameter: a power of two is needed", ptx_line=line)
            align = align if pointer else number  # behind .ptr it is the alignment of what is pointed to
        elif directive[1:] in TYPE_BITS:
            element = directive[1:]
        elif directive not in (".ptr", ".global", ".shared"):
            raise UnsupportedPTX(f"{directive!r} of a parameter is not supported", ptx_line=line)
    if not element:
        raise UnsupportedPTX(f"a parameter without a type, {reader.peek()!r}", ptx_line=line)
    size = TYPE_BITS[element] // 8
    if not size:
        raise UnsupportedPTX(f"a parameter of type .{element}: PTX has parameters of whole bytes only", ptx_line=line)
    align = align or size
    name = reader.take().text
    if reader.peek() == "[":
        reader.take()
        size *= reader.take_number()
        reader.take("]")
    end = before[-1].offset + before[-1].nbytes if before else 0
    start = -(-end // align) * align
    if start + size > _MOST_PARAMETER_BYTES:
        message = f"parameters of {start + size} bytes; a launch takes {_MOST_PARAMETER_BYTES} at most"
        raise UnsupportedPTX(message, ptx_line=line)
    return Parameter(name, align, size, start, element)
