"""Calls of functions outside of the module: vprintf, which prints, and __assertfail, which stops the kernel."""

import re
import struct
import sys
from collections.abc import Callable

import numpy as np

from cute_kernels.emulator.errors import EmulatorError, IllegalAccess, UnsupportedPTX
from cute_kernels.emulator.isa.instructions.sync import each_lane, lane_numbers
from cute_kernels.emulator.isa.ptx.families import always_varies
from cute_kernels.emulator.isa.ptx.program import Instruction, Symbol, Vector
from cute_kernels.emulator.machine.graph.block import BlockBuilder
from cute_kernels.emulator.machine.graph.families import family
from cute_kernels.emulator.machine.state.lane_masks import LaneValues
from cute_kernels.emulator.machine.units.copies.generic_accesses import space_of
from cute_kernels.emulator.machine.units.sm import Warp

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d*)(?P<precision>\.\d+)?(?P<size>hh|h|ll|l|z)?(?P<type>[diuoxXcsfFeEgGp%])"
)
_LONGEST_TEXT = 4096
_WIDEST = 4095  # characters of one conversion that every printf of C has to be able to print


def _read(warp: Warp, lane: int, address: int, nbytes: int) -> bytes:
    """Bytes at a generic address as one lane sees them."""
    space, where = space_of("generic", address)
    if space == "local":
        if not 0 <= where <= warp.local.shape[1] - nbytes:
            raise IllegalAccess(f"{nbytes} bytes of local memory at {where:#x}, which has {warp.local.shape[1]}")
        return bytes(warp.local[lane, where : where + nbytes])
    memory = warp.cluster.memory if space == "shared" else warp.cluster.gmem
    return bytes(memory.view(where, nbytes))


def _text(warp: Warp, lane: int, address: int) -> str:
    raw = bytearray()
    while len(raw) < _LONGEST_TEXT:
        byte = _read(warp, lane, address + len(raw), 1)
        if byte == b"\0":
            break
        raw += byte
    return raw.decode("latin-1")


def formatted(template: str, fetch: Callable[[int], bytes], text_at: Callable[[int], str]) -> tuple[str, int]:
    """(text, arguments used) of printf. ``template``: C format. ``fetch``: (offset, bytes) -> bytes of the argument
    buffer, in which every argument is aligned to its size. ``text_at``: address -> string, for %s."""
    out, at, position, count = [], 0, 0, 0
    for match in _CONVERSION.finditer(template):
        out.append(template[position : match.start()])
        position = match.end()
        kind = match["type"]
        if kind == "%":
            out.append("%")
            continue
        if max(int(match["width"] or 0), int((match["precision"] or ".")[1:] or 0)) > _WIDEST:
            raise UnsupportedPTX(f"vprintf of {match[0]!r}: widths and precisions up to {_WIDEST} are printed")
        wide = kind in "fFeEgGsp" or match["size"] in ("l", "ll", "z")
        nbytes = 8 if wide else 4
        at = -(-at // nbytes) * nbytes
        raw = fetch(at, nbytes)
        at += nbytes
        count += 1
        if kind in "fFeEgG":
            value: float | int | str = struct.unpack("<d", raw)[0]
        else:
            value = int.from_bytes(raw, "little", signed=kind in "di")
        if kind == "s":
            value = text_at(value)
        elif kind == "c":
            value &= 0xFF
        spec = f"%{match['flags']}{match['width']}{match['precision'] or ''}"
        out.append(hex(value) if kind == "p" else f"{spec}{kind}" % value)
    out.append(template[position:])
    return "".join(out), count


def vprintf(warp: Warp, mask: int, template: LaneValues, arguments: LaneValues) -> np.ndarray:
    """vprintf by each executing lane, in lane order; the number of arguments printed."""
    counts = np.zeros(32, np.uint32)
    for lane in lane_numbers(mask):
        ((where, buffer),) = each_lane(1 << lane, template, arguments)

        def fetch(offset: int, nbytes: int, lane: int = lane, buffer: int = buffer) -> bytes:
            return _read(warp, lane, buffer + offset, nbytes)

        def text_at(address: int, lane: int = lane) -> str:
            return _text(warp, lane, address)

        text, counts[lane] = formatted(_text(warp, lane, where), fetch, text_at)
        sys.stdout.write(text)
    sys.stdout.flush()
    return counts


def assert_fail(
    warp: Warp, mask: int, message: LaneValues, file: LaneValues, line: LaneValues, function: LaneValues,
    size: LaneValues,
) -> None:  # fmt: skip
    """__assertfail: reports the assertion of the first executing lane."""
    for lane in lane_numbers(mask):
        ((what, where, number, name),) = each_lane(1 << lane, message, file, line, function)
        texts = [_text(warp, lane, address) if address else "?" for address in (what, where, name)]
        place = f"{texts[2]} ({texts[1]}:{number & 0xFFFFFFFF})"
        raise EmulatorError(f"assertion `{texts[0]}` failed in {place}, lane {lane}").know("trap")


@family("call", varies=always_varies, operands=None, qualifiers="uni?")
def _call(block: BlockBuilder, instruction: Instruction) -> None:
    """call of vprintf (prints at once) and __assertfail (stops the kernel); .func of the module, by name or address."""
    operands = list(instruction.operands)
    result = operands.pop(0) if isinstance(operands[0], Vector) else None
    name = operands[0].name if isinstance(operands[0], Symbol) else ""
    arguments = operands[1].items if len(operands) > 1 and isinstance(operands[1], Vector) else ()
    widths = {"vprintf": (64, 64), "__assertfail": (64, 64, 32, 64, 64)}.get(name)
    if widths is None or len(arguments) != len(widths) or (result is None) != (name == "__assertfail"):
        raise instruction.refuse("of functions outside of the module, only vprintf and __assertfail can be called")
    values = [block.value(argument, width) for argument, width in zip(arguments, widths)]
    if result is None:
        block.call(assert_fail, *values)
        return
    (count,) = block.call(vprintf, *values, results=[("u32", False)])
    block.define(result.items[0], count)
