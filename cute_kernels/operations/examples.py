"""Random operands for a plan, laid out as its operation lays out those of a call."""

import torch

from cute_kernels.operations.registry import operation_of
from cute_kernels.operations.runtime.operands import Operands
from cute_kernels.plan import Plan

ALIGNMENT = 256
"""Alignment of addresses of device memory in bytes."""


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
