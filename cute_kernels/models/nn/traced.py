"""A converted embedding as one operator in graphs that are compiled or exported: ``cute_kernels::embed_patches``, or
``cute_kernels::embed_normed`` of one that begins with a LayerNorm.

The kernels read what is made from the weight, which the module keeps and makes anew when the weight changes. In a graph
the operator keeps it instead, by the weight's object and by its options, which travel in the graph as text: so a graph
means the same in another process.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cute_kernels.models.nn import availability
from cute_kernels.models.nn.positions import PositionCache
from cute_kernels.operations.base import define_operator

_RUNNERS = WeakTensorKeyDictionary()
"""Weight -> kind of runner and text of the options -> what runs calls with it, and the positions of these calls."""


@contextlib.contextmanager
def kernels_in_export() -> Iterator[None]:
    """Keeps the operator in what `torch.export.export` makes inside; without it the plain module is exported.

    The exported program needs ``import cute_kernels`` where it is loaded.
    """
    before, availability.KEPT_IN_EXPORT = availability.KEPT_IN_EXPORT, True
    try:
        yield
    finally:
        availability.KEPT_IN_EXPORT = before


def define(runner: Callable[[str], object]) -> None:
    """Defines the operator; ``runner`` gives from the text of options what runs it, by its method ``run``."""
    tensors = "Tensor pixels, Tensor weight, Tensor? bias, Tensor? pos_embed, Tensor? position_ids"
    define_operator("embed_patches", f"{tensors}, str options", functools.partial(_run, runner), _fake)


def _run(runner, pixels, weight, bias, pos_embed, position_ids, options: str) -> torch.Tensor:
    engine, positions = _known(runner, weight, options)
    if pixels.dim() != 4:
        return engine.run(pixels, weight, bias, pos_embed, position_ids)
    if pos_embed is not None:
        count = pos_embed.shape[-2]
        pos_embed = positions.table(pos_embed, (count, 1), (count, 1))
        if position_ids is not None and not positions.in_order(position_ids, count):
            pos_embed = pos_embed[position_ids[0]]
    return engine.run(pixels, weight, bias, pos_embed)


def _known(runner: Callable[[str], object], weight: torch.Tensor, options: str) -> tuple[object, PositionCache]:
    known = _RUNNERS.setdefault(weight, {})
    if (runner, options) not in known:
        known[runner, options] = runner(options), PositionCache()
    return known[runner, options]


def define_normed(runner: Callable[[str], object]) -> None:
    """Defines the operator of rows behind a LayerNorm, run by ``run_normed`` of what ``runner`` gives."""

    def run(pixels, weight, *others: object) -> torch.Tensor:
        *norm, eps, options = others
        return _known(runner, weight, options)[0].run_normed(pixels, (weight, *norm), eps)

    def fake(pixels, weight, *_: object) -> torch.Tensor:
        return pixels.new_empty((*pixels.shape[:-1], weight.shape[0]), dtype=weight.dtype)

    tensors = "Tensor pixels, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias"
    define_operator("embed_normed", f"{tensors}, float eps, str options", run, fake)


def _fake(pixels, weight, bias, pos_embed, position_ids, options: str) -> torch.Tensor:
    features = weight.shape[0]
    if pixels.dim() != 4:
        return pixels.new_empty((*pixels.shape[:-1], features), dtype=weight.dtype)
    patch = weight.shape[-1]
    count = (pixels.shape[2] // patch) * (pixels.shape[3] // patch)
    return pixels.new_empty((pixels.shape[0], count, features), dtype=weight.dtype)
