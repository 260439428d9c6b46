"""How the operators run on `torch.distributed.tensor.DTensor`: which shards of the arguments give which of the result.

DTensor asks for the shardings of an operator along one dimension of a device mesh, combines them over all dimensions,
and takes the combination that costs least to bring the arguments into. So every placement of the arguments works: what
is in no sharding (shards along K, partial sums) is redistributed first, at worst to replicas.

The sum over K is never divided: the shards' sums would be rounded before they are added, and the result would differ
from the operator's contract.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Shape = tuple[int, ...]
Sharding = tuple[int, dict[str, int]]
"""Dimension of the result that is sharded, and of every argument that is; all other arguments are replicated."""

_TENSORS = "torch.distributed.tensor"


Shardings = Callable[[Mapping[str, Shape], int], Iterator[Sharding]]
"""`cute_kernels.operations.base.Operation.shardings`."""


def register_if_used(name: str, shardings: Shardings) -> None:
    """Registers like `register`, if somebody has imported DTensor, which takes seconds and is not done here."""
    if _TENSORS in sys.modules:
        register(name, shardings)


@functools.cache
def register(name: str, shardings: Shardings) -> None:
    """Registers the shardings of an operator with DTensor, which is imported.

    It happens by itself where DTensor, before it looks for shardings, asks an operator for the type of its result.
    ``name``: of ``torch.ops.cute_kernels``; ``shardings``: what may be divided. Raises RuntimeError: this build of
    torch has no torch.distributed."""
    if not torch.distributed.is_available():
        raise RuntimeError("this build of torch has no torch.distributed, and so no DTensor")
    import torch.distributed.tensor as tensors
    import torch.distributed.tensor._op_schema as schema
    import torch.distributed.tensor.experimental as experimental

    operator = getattr(torch.ops.cute_kernels, name).default
    experimental.register_sharding(operator)(functools.partial(_placements, operator, shardings))
    # DTensor remembers its decisions by the arguments from this one on, and by the tensors among those before it. By
    # itself it would begin at the first integer, which leaves out which of the optional tensors are None.
    propagator = tensors.DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[operator] = schema.RuntimeSchemaInfo(static_argnum=1, needs_pytree=True)


def _placements(operator: Any, shardings: Shardings, *given: Any) -> list[tuple[list, list]]:
    """Answer to `register_sharding` for things with the tensors' shapes and mesh: placements of result and arguments.
    """
    import torch.distributed.tensor as tensors

    names = [argument.name for argument in operator._schema.arguments]
    specs = {name: value for name, value in zip(names, given) if hasattr(value, "mesh")}
    mesh = next(iter(specs.values())).mesh
    shapes = {name: tuple(spec.shape) for name, spec in specs.items()}
    found = []
    for along, by_name in [(None, {}), *shardings(shapes, mesh.size())]:
        placements = [
            None if name not in specs else tensors.Shard(by_name[name]) if name in by_name else tensors.Replicate()
            for name, _ in zip(names, given)
        ]
        found.append(([tensors.Replicate() if along is None else tensors.Shard(along)], placements))
    return found
