"""Every operation by the class of its problems."""

from typing import Any

from cute_kernels.operations.base import Operation
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES

OPERATIONS: dict[type, Operation] = {
    operation.planner.problem: operation for operation in (PATCH_EMBED, PATCH_EMBED_IMAGES, GEMM)
}


def operation_of(problem: Any) -> Operation:
    """The operation that a problem is one of. Raises TypeError: there is none."""
    if type(problem) not in OPERATIONS:
        allowed = ", ".join(kind.__name__ for kind in OPERATIONS)
        raise TypeError(f"problem is {type(problem).__name__}: must be one of {allowed}")
    return OPERATIONS[type(problem)]
