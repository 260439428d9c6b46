"""Every operation by the class of its problems; random operands for a plan, laid out as those of a call."""

from typing import Any

import torch

from cute_kernels.operations.base import Operation
from cute_kernels.operations.gemm import GEMM
from cute_kernels.operations.patch_embed import PATCH_EMBED
from cute_kernels.operations.patch_embed_images import PATCH_EMBED_IMAGES
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan

OPERATIONS: dict[type, Operation] = {
    operation.planner.problem: operation for operation in (PATCH_EMBED, PATCH_EMBED_IMAGES, GEMM)
}

ALIGNMENT = 256
"""Alignment of addresses of device memory in bytes."""


def operation_of(problem: Any) -> Operation:
    """The operation that a problem is one of. Raises TypeError: there is none."""
    if type(problem) not in OPERATIONS:
        allowed = ", ".join(kind.__name__ for kind in OPERATIONS)
        raise TypeError(f"problem is {type(problem).__name__}: must be one of {allowed}")
    return OPERATIONS[type(problem)]


def random_operands(plan: Plan, device: str = "cpu") -> Operands:
    """Random operands: the same for equal problems on equal devices; on the CPU placed as on a device."""
    operation = operation_of(plan.problem)
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.manual_seed(0)
        operands = operation.prepare(operation.example(plan.problem, device), plan).operands
    if device != "cpu":
        return operands
    return operands.replace(**{name: placed(tensor) for name, tensor in operands.tensors().items()})


def placed(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """A copy on a device whose address is a multiple of 256, as device memory is and host memory may not be: where the
    lines and sectors of an array begin decides how many of them an access touches."""
    nbytes = tensor.numel() * tensor.itemsize
    store = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -store.data_ptr() % ALIGNMENT
    copy = store[skip : skip + nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)
