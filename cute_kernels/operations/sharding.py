"""How the operators run on `torch.distributed.tensor.DTensor`: which shards of the arguments give which of the result.

DTensor asks for the shardings of an operator along one dimension of a device mesh, combines them over all dimensions,
and takes the combination that costs least to bring the arguments into. So every placement of the arguments works: what
is in no sharding (shards along K, partial sums) is redistributed first, at worst to replicas.

The sum over K is never divided: the shards' sums would be rounded before they are added, and the result would differ
from the operator's contract.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Shape = tuple[int, ...]
Sharding = tuple[int, dict[str, int]]
"""Dimension of the result that is sharded, and of every argument that is; all other arguments are replicated."""

_TENSORS = "torch.distributed.tensor"


def patch_embed_shardings(shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
    """Images or rows, positions, features.

    Rows ``[B * S, K]`` with a position embedding count positions from their first row, so that only whole images may be
    divided; features are divided in multiples of the 8 that the operator takes. Multipliers of rows and features are
    divided with them; those of the rows of a 3-D ``x`` as ``[B * S, 1]`` where the parts are equal, along B.

    Args:
        shapes: of the tensors that are given, by argument.
        parts: into which a dimension may be divided at most.
    """
    x, n = shapes["x"], shapes["weight"][0]
    indexed, positions = "pos_index" in shapes, shapes.get("pos_embed", (1,))[0]
    row_scale = shapes.get("scale_a", ())
    by_row = math.prod(row_scale) > 1
    flat = by_row and len(row_scale) < len(x)
    rows = {"x": 0} | ({"pos_index": 0} if indexed else {}) | ({"scale_a": 0} if by_row else {})
    if (len(x) == 3 or indexed or x[0] // positions % parts == 0) and not (flat and x[0] % parts):
        yield 0, rows
    if len(x) == 3 and not flat:
        along = {"pos_index": 1} if indexed else {"pos_embed": 0}
        yield 1, {"x": 1} | along | ({"scale_a": 1} if by_row else {})
    if n % (8 * parts) == 0:
        counted = len(x) == 3 or ("pos_embed" in shapes and not indexed)
        by_feature = {"scale_b": 1} if math.prod(shapes.get("scale_b", ())) > 1 else {}
        yield 2 if counted else 1, {"weight": 0, "bias": 0, "pos_embed": 1} | by_feature


def patch_embed_images_shardings(shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
    """Images, rows of patches, features; arguments as of `patch_embed_shardings`.

    Rows of pixels are divided where every part has whole patches: positions count them row by row, so that a part's
    are neighbours. Of the weight, all that is made per feature is divided with it.
    """
    images, (n, k) = shapes["images"], shapes["weight"]
    patch = math.isqrt(k // images[1])
    yield 0, {"images": 0}
    if images[2] % (patch * parts) == 0:
        yield 1, {"images": 2, "pos_embed": 0}
    if n % (8 * parts) == 0:
        per_feature = ("weight", "weight_low", "weight_scale", "weight_offset", "bias")
        yield 2, dict.fromkeys(per_feature, 0) | {"pos_embed": 1}


def gemm_shardings(shapes: Mapping[str, Shape], parts: int) -> Iterator[Sharding]:
    """Batches, rows of ``a``, rows of ``b``; arguments as of `patch_embed_shardings`."""
    rows = len(shapes["a"]) - 2
    batched = len(shapes["b"]) == 3
    if rows:
        yield 0, {"a": 0} | ({"b": 0} if batched else {})
    yield rows, {"a": rows}
    yield rows + 1, {"b": int(batched), "bias": 0}


SHARDINGS: dict[str, Callable[[Mapping[str, Shape], int], Iterator[Sharding]]] = {
    "gemm": gemm_shardings,
    "patch_embed": patch_embed_shardings,
    "patch_embed_images": patch_embed_images_shardings,
}
"""By operator of ``torch.ops.cute_kernels``."""


def register_if_used(name: str) -> None:
    """Registers like `register`, if somebody has imported DTensor, which takes seconds and is not done here."""
    if name in SHARDINGS and _TENSORS in sys.modules:
        register(name)


@functools.cache
def register(name: str) -> None:
    """Registers the shardings of an operator with DTensor, which is imported.

    It happens by itself where DTensor, before it looks for shardings, asks an operator for the type of its result.

    Args:
        name: a key of `SHARDINGS`.

    Raises:
        RuntimeError: this build of torch has no torch.distributed.
    """
    if not torch.distributed.is_available():
        raise RuntimeError("this build of torch has no torch.distributed, and so no DTensor")
    import torch.distributed.tensor as tensors
    import torch.distributed.tensor._op_schema as schema
    import torch.distributed.tensor.experimental as experimental

    operator = getattr(torch.ops.cute_kernels, name).default
    experimental.register_sharding(operator)(functools.partial(_placements, operator, SHARDINGS[name]))
    # DTensor remembers its decisions by the arguments from this one on, and by the tensors among those before it. By
    # itself it would begin at the first integer, which leaves out which of the optional tensors are None.
    propagator = tensors.DTensor._op_dispatcher.sharding_propagator
    propagator.op_to_schema_info[operator] = schema.RuntimeSchemaInfo(static_argnum=1, needs_pytree=True)


def _placements(operator: Any, shardings: Callable[..., Iterator[Sharding]], *given: Any) -> list[tuple[list, list]]:
    """What `register_sharding` asks for: placements of the result and of the arguments, None for what is no tensor.

    Args:
        operator: overload, for the names of its arguments.
        shardings: of `SHARDINGS`.
        given: the arguments; in place of each tensor something with its shape and mesh.
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
