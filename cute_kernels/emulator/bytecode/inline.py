"""Functions of sites that the core does by itself: all of them, or their frequent case.

Each emits an instruction of ``core/unit_operations.c`` that does the frequent case; what that leaves is for the Python
function, which decides again and words the error.
"""

from __future__ import annotations

from collections.abc import Callable

from cute_kernels.emulator.bytecode.emitter import BlockEmitter, Inline
from cute_kernels.emulator.core.layout import word_count
from cute_kernels.emulator.graph.values import LiveIn, Node
from cute_kernels.emulator.instructions import tcgen05
from cute_kernels.emulator.units.matrix.operands import KINDS

_MMA_WORDS = word_count("MmaArguments")
_KINDS = tuple(KINDS)
_ZERO = 1  # in a list of words: none, the number 0


def _constant(emitter: BlockEmitter, expression: str, bits: int = 64) -> int:
    """A word that never changes for a warp."""
    return emitter.live(LiveIn(expression, bits, True))


# --- units ----------------------------------------------------------------------------------------------------------


def _issuer(emitter: BlockEmitter) -> int:
    """CTA rank and number of the warp, as keys of `core_units` have them."""
    return _constant(emitter, "(W.cta.rank | W.number << 16)")


def _inline_mma(emitter: BlockEmitter, node: Node) -> bool:
    """tcgen05.mma with A in shared memory, by one lane of which Python has told."""
    kind, group, d, a, b, instruction, accumulate, a_in_tmem, disabled = node.anchor.args
    if a_in_tmem:
        return False
    off = _ZERO
    for value in disabled:  # lanes of the accumulator that are left out: refused by Python
        off = emitter.word(value) if off == _ZERO else emitter.either(off, emitter.word(value))
    operands = [emitter.word(value) for value in (d, a, b, instruction, accumulate)]
    words = [emitter.literal(group), _ZERO, emitter.literal(_KINDS.index(kind)), *operands, off]
    assert len(words) == _MMA_WORDS
    listed = emitter.program.list([*words, 0])
    emitter.fast(node, "tensor_mma", in_rows=True, a=_issuer(emitter), c=listed, imm=node.instruction.index)
    return True


INLINE: dict[Callable[..., object], Inline] = {
    tcgen05.mma: _inline_mma,
}
