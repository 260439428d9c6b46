"""Replacing the layers of models that exist, for the libraries whose models have plain layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cute_kernels.models.nn.calls import reaches_class
from cute_kernels.models.nn.layers import check_layer, convert_layer, is_converted, options_of, revert_layer
from cute_kernels.models.nn.options import PatchOptions

Found = tuple[str, torch.nn.Module, PatchOptions]
"""A layer to be converted: its name in the model, itself, and its options."""


def check_model(model: torch.nn.Module) -> None:
    """Refuses what is no module.

    Raises:
        TypeError: as said.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}: must be torch.nn.Module")


def convert_all(
    model: torch.nn.Module, found: Iterable[Found], expected: str
) -> torch.nn.Module:
    """Converts the layers that were found in ``model``, all or none, and returns it.

    Args:
        model: the model.
        found: the layers.
        expected: what would have been found, for the error's text.

    Raises:
        ValueError: nothing was found; a layer that is no patch embedding, by its name.
    """
    found = list(found)
    if not found:
        raise ValueError(f"model is {type(model).__name__}, which has no {expected}")
    for name, layer, options in found:
        if is_converted(layer):  # which gets other options
            continue
        try:
            check_layer(layer, options.channels, options.order)
            options_of(layer, options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} cannot be converted: {error}") from error
    for _, layer, options in found:
        convert_layer(layer, options)
    return model


def all_converted(
    model: torch.nn.Module, found: Iterable[tuple[torch.nn.Module, torch.nn.Module]], expected: str
) -> bool:
    """Whether calls of every embedding of ``model`` come to this package.

    Args:
        model: the model.
        found: the embeddings, and the layer of each.
        expected: as for `convert_all`.

    Raises:
        ValueError: nothing was found.
    """
    found = list(found)
    if not found:
        raise ValueError(f"model is {type(model).__name__}, which has no {expected}")
    return all(reaches_class(embedding) and is_converted(layer) for embedding, layer in found)


def revert_all(model: torch.nn.Module) -> torch.nn.Module:
    """Gives every converted layer of ``model`` its own class back."""
    check_model(model)
    for module in model.modules():
        revert_layer(module)
    return model
