"""Strategies for hypothesis: schedules, shapes, strides and values of tensors."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cute_kernels.emulator.machine.launch.schedule import Schedule
from cute_kernels.emulator.options import CLUSTERS, COMPLETIONS, INTERLEAVES
from cute_kernels.testing.data import exact, varied


def schedules(*, overlap: bool = False) -> SearchStrategy[Schedule]:
    """Any schedule; a failure is reduced towards the default one. ``overlap``: launches may overlap in some."""
    return st.builds(
        Schedule, seed=st.integers(0, 2**16), completion=st.sampled_from(COMPLETIONS),
        interleave=st.sampled_from(INTERLEAVES), spurious_timeouts=st.booleans(),
        overlap=st.booleans() if overlap else st.just(False), interleave_clusters=st.sampled_from(CLUSTERS),
    )


def shapes(
    *most: int, multiples: Sequence[int] | None = None, least: Sequence[int] | None = None
) -> SearchStrategy[tuple[int, ...]]:
    """Shapes with these largest extents.

    Args:
        most: largest extent of each dimension.
        multiples: each extent is a multiple of its item; of 1 if None.
        least: smallest extent of each dimension; its multiple if None.

    Raises:
        ValueError: another number of multiples or least extents than dimensions, or no extent that fits.
    """
    steps = tuple(multiples) if multiples is not None else (1,) * len(most)
    lows = tuple(least) if least is not None else steps
    for name, values in (("multiples", steps), ("least", lows)):
        if len(values) != len(most):
            raise ValueError(f"{name} = {values}: must be one for each of the {len(most)} dimensions")
    extents = []
    for dimension, (low, high, step) in enumerate(zip(lows, most, steps)):
        if step < 1 or -(-low // step) > high // step:
            raise ValueError(f"dimension {dimension}: no multiple of {step} lies between {low} and {high}")
        extents.append(st.integers(-(-low // step), high // step).map(lambda n, step=step: n * step))
    return st.tuples(*extents)


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], *, alignment: int = 1, most_padding: int = 64) -> tuple[int, ...]:
    """Strides, in elements, of a tensor that overlaps nowhere: dimensions in any order, with gaps between them.

    Args:
        draw: hypothesis's.
        shape: extents.
        alignment: all strides but the smallest are multiples of this many elements, as TMA asks for 16 bytes.
        most_padding: largest gap behind a dimension.
    """
    order = draw(st.permutations(range(len(shape)))) if len(shape) > 1 else list(range(len(shape)))
    strides, pitch = [0] * len(shape), 1
    for place, dimension in enumerate(order):
        strides[dimension] = pitch
        gap = draw(st.integers(0, most_padding)) if place < len(shape) - 1 else 0
        pitch = -(-(pitch * shape[dimension] + gap) // alignment) * alignment
    return tuple(strides)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: Sequence[int],
    *dtypes: torch.dtype,
    terms: int | None = None,
    alignment: int = 1,
    most_padding: int = 0,
    device: str | torch.device = "cuda",
) -> torch.Tensor:
    """Tensors of one shape: type, values and layout are drawn.

    Args:
        draw: hypothesis's.
        shape: extents.
        dtypes: element types, of which the first is the simplest.
        terms: as of `exact`, for operands of tensor cores, so that no order of additions matters; None: `varied`.
        alignment, most_padding: as of `layouts`; without padding the tensor is compact.
        device: where it lies.

    Raises:
        ValueError: no dtype.
    """
    if not dtypes:
        raise ValueError("dtypes is empty: must be at least one")
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16))
    stride = draw(layouts(shape, alignment=alignment, most_padding=most_padding)) if most_padding else None
    if terms is None:
        return varied(shape, dtype, seed=seed, stride=stride, device=device)
    return exact(shape, dtype, terms=terms, seed=seed, stride=stride, device=device)
