"""Functions of sites that the core does by itself: all of them, or their frequent case.

Each emits an instruction of ``core/unit_operations.c`` that does the frequent case; what that leaves is for the Python
function, which decides again and words the error.
"""

from __future__ import annotations

from collections.abc import Callable

from cute_kernels.emulator.bytecode.emitter import BlockEmitter, Inline
from cute_kernels.emulator.graph.values import Node
from cute_kernels.emulator.instructions.mma import mma_sync


def _inline_mma_sync(emitter: BlockEmitter, node: Node) -> bool:
    """mma.sync by the whole warp."""
    form, *operands, _ = node.anchor.args
    if not form.in_core:
        return False
    places = [emitter.operand(value, True) for values in operands for value in values]
    places += [emitter.define(result) for result in node.results]
    emitter.fast(node, "warp_mma", b=emitter.program.list([emitter.program.warp_mma(form), *places]))
    return True


INLINE: dict[Callable[..., object], Inline] = {
    mma_sync: _inline_mma_sync,
}
