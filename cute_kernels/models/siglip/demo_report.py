"""Tables and figures for people. Nothing here computes a result that is not shown."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Accuracy:
    """The output of one implementation, which ``backend`` executed, compared with the references. ``mismatches``:
    elements whose BF16 bits differ from the reference of the same contract, None for that reference;
    ``relative_error``: norm of the difference to FP32 over the norm of FP32."""

    name: str
    backend: str
    shape: tuple[int, ...]
    mismatches: int | None
    relative_error: float
    max_abs_error: float
    cosine: float


def compare(name: str, backend: str, out: torch.Tensor, reference: torch.Tensor | None, fp32: torch.Tensor) -> Accuracy:
    """Compares a BF16 output bit for bit with ``reference`` and numerically with ``fp32``, all of one shape."""
    mismatches = None
    if reference is not None:
        mismatches = int((out.view(torch.int16) != reference.view(torch.int16)).sum())
    got, expected = out.to(torch.float64).flatten(), fp32.to(torch.float64).flatten()
    errors = (got - expected).norm() / expected.norm(), (got - expected).abs().max()
    cosine = torch.nn.functional.cosine_similarity(got, expected, dim=0)
    return Accuracy(name, backend, tuple(out.shape), mismatches, *map(float, (*errors, cosine)))


def accuracy_table(columns: Sequence[Accuracy]) -> Table:
    """One column per implementation."""

    def mismatches(accuracy: Accuracy) -> str:
        if accuracy.mismatches is None:
            return "-"
        style = "bold red" if accuracy.mismatches else "green"
        return f"[{style}]{accuracy.mismatches:,} of {math.prod(accuracy.shape):,}[/]"

    table = Table(title="Results", title_justify="left")
    table.add_column("")
    for accuracy in columns:
        table.add_column(accuracy.name)
    for heading, value in (
        ("executed by", lambda c: c.backend),
        ("shape", lambda c: " × ".join(map(str, c.shape))),
        ("bit mismatches to reference", mismatches),
        ("relative error to FP32", lambda c: f"{c.relative_error:.2%}"),
        ("max abs error to FP32", lambda c: f"{c.max_abs_error:.4g}"),
        ("cosine to FP32", lambda c: f"{c.cosine:.6f}"),
    ):
        table.add_row(heading, *map(value, columns))
    return table


@dataclass(frozen=True)
class RgbBasis:
    """Three principal components of a set of embeddings, and the range of each that becomes 0..1."""

    mean: torch.Tensor
    components: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def __call__(self, embeddings: torch.Tensor) -> torch.Tensor:
        """``[..., N]`` -> ``[..., 3]`` float64 in [0, 1]."""
        projected = (embeddings.to(torch.float64) - self.mean) @ self.components
        return ((projected - self.low) / (self.high - self.low)).clamp(0, 1)


def fit_rgb(embeddings: torch.Tensor) -> RgbBasis:
    """Principal components of ``[..., N]`` embeddings over all leading axes, N >= 3.

    The 1st and 99th percentile of each component become 0 and 1. The sign of a component makes the sum of its weights
    positive, so that the picture does not depend on the eigensolver's choice.
    """
    points = embeddings.reshape(-1, embeddings.shape[-1]).to(torch.float64)
    mean = points.mean(0)
    centred = points - mean
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -3:].flip(1)
    components = components * torch.where(components.sum(0) < 0, -1.0, 1.0)
    limits = torch.quantile(centred @ components, torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0)
    # A component without any spread would divide by zero; it maps to a constant then.
    return RgbBasis(mean, components, limits[0], torch.maximum(limits[1], limits[0] + 1e-12))


# Of a figure, in inches.
_CELL, _GAP, _LABEL, _EDGE = 1.7, 0.12, 0.36, 0.1
_TITLE_POINTS, _FOOTNOTE_POINTS, _LABEL_POINTS = 11, 8, 8
_LABEL_CHARACTERS = 24  # fit along a cell


def draw_figure(
    photos: "Sequence[np.ndarray]", maps: dict[str, torch.Tensor], *, title: str, footnote: str, names: Sequence[str]
) -> "Figure":
    """Each photo, square RGB ``[H, W, 3]``, beside its maps; two photos in a row when there are more than three, and
    two maps at most. ``maps``: title, of one or more lines -> ``[len(photos), grid, grid, 3]`` colours in [0, 1].
    Title and footnote are wrapped to the figure's width, long names of photos shortened."""
    from matplotlib.figure import Figure

    per_photo, per_row = 1 + len(maps), 2 if len(photos) > 3 and len(maps) < 3 else 1
    lines = -(-len(photos) // per_row)
    # A group is a label, a photo and its maps.
    group_width = _LABEL + per_photo * _CELL + (per_photo - 1) * _GAP
    width = per_row * group_width + 2 * _EDGE
    title, title_height = _wrapped(title, _TITLE_POINTS, width)
    footnote, footnote_height = _wrapped(footnote, _FOOTNOTE_POINTS, width)
    heading_height = 0.1 + 0.15 * max(1 + name.count("\n") for name in maps)
    height = 2 * _EDGE + title_height + heading_height + lines * (_CELL + _GAP) + footnote_height
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    for index, photo in enumerate(photos):
        line, group = divmod(index, per_row)
        left = _EDGE + group * group_width + _LABEL
        bottom = height - _EDGE - title_height - heading_height - line * (_CELL + _GAP) - _CELL
        pictures = {"photo": photo} | {name: colours[index].numpy() for name, colours in maps.items()}
        for column, (name, picture) in enumerate(pictures.items()):
            place = ((left + column * (_CELL + _GAP)) / width, bottom / height, _CELL / width, _CELL / height)
            axes = figure.add_axes(place)
            axes.imshow(picture, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if line == 0:
                axes.set_title(name, fontsize=9, parse_math=False)
            if column == 0:
                label = textwrap.shorten(names[index], 10**6)  # one line
                if len(label) > _LABEL_CHARACTERS:
                    label = label[: _LABEL_CHARACTERS - 1] + "…"
                axes.set_ylabel(label, fontsize=_LABEL_POINTS, parse_math=False)
    centred = {"ha": "center", "parse_math": False}
    figure.text(0.5, 1 - _EDGE / height, title, va="top", fontsize=_TITLE_POINTS, **centred)
    figure.text(0.5, _EDGE / height, footnote, va="bottom", fontsize=_FOOTNOTE_POINTS, color="0.35", **centred)
    return figure


def _wrapped(text: str, points: float, width: float) -> tuple[str, float]:
    """The text in lines that fit ``width`` inches, and the height of all lines in inches."""
    # An average character of the default font is half its size wide; 0.56 leaves room for wide ones.
    characters = int((width - 2 * _EDGE) * 72 / (0.56 * points))
    lines = textwrap.wrap(text, characters)
    return "\n".join(lines), len(lines) * 1.3 * points / 72
