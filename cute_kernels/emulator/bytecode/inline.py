"""Functions of sites that the core does by itself: all of them, or their frequent case.

Each emits an instruction of ``core/unit_operations.c`` that does the frequent case; what that leaves is for the Python
function, which decides again and words the error.
"""

from __future__ import annotations

from collections.abc import Callable

from cute_kernels.emulator.bytecode.emitter import BlockEmitter, Inline
from cute_kernels.emulator.bytecode.program import ISSUER
from cute_kernels.emulator.graph.values import LiveIn, Node
from cute_kernels.emulator.instructions import wgmma
from cute_kernels.emulator.instructions.mma import mma_sync


def _constant(emitter: BlockEmitter, expression: str, bits: int = 64) -> int:
    """A word that never changes for a warp."""
    return emitter.live(LiveIn(expression, bits, True))


def _inline_mma_sync(emitter: BlockEmitter, node: Node) -> bool:
    """mma.sync by the whole warp."""
    form, *operands, _ = node.anchor.args
    if not form.in_core:
        return False
    places = [emitter.operand(value, True) for values in operands for value in values]
    places += [emitter.define(result) for result in node.results]
    emitter.fast(node, "warp_mma", b=emitter.program.list([emitter.program.warp_mma(form), *places]))
    return True


# --- units ----------------------------------------------------------------------------------------------------------


def _inline_wgmma_commit(emitter: BlockEmitter, node: Node) -> bool:
    emitter.fast(node, "wgmma_commit", a=_constant(emitter, ISSUER))
    return True


def _inline_wgmma_wait(emitter: BlockEmitter, node: Node) -> bool:
    """wgmma.wait_group."""
    alone = not emitter.builder.divergent
    emitter.fast(node, "wgmma_wait", a=_constant(emitter, ISSUER), c=int(alone), imm=node.anchor.args[0])
    return True


INLINE: dict[Callable[..., object], Inline] = {
    mma_sync: _inline_mma_sync,
    wgmma.commit_group: _inline_wgmma_commit,
    wgmma.wait_group: _inline_wgmma_wait,
}
