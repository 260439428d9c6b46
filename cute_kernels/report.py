"""Tables and figures for people. Nothing here computes a result that is not shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np

    from cute_kernels.compile import Resources
    from cute_kernels.plan import Plan


@dataclass(frozen=True)
class Accuracy:
    """One implementation's output, compared with the references.

    Attributes:
        name: the implementation.
        backend: what executed it.
        shape: of the output.
        mismatches: elements whose BF16 bits differ from the reference of the same contract; None for that reference.
        max_abs_error: largest absolute difference to FP32.
        cosine: cosine similarity of the whole output to FP32.
    """

    name: str
    backend: str
    shape: tuple[int, ...]
    mismatches: int | None
    max_abs_error: float
    cosine: float


def compare(name: str, backend: str, out: torch.Tensor, reference: torch.Tensor | None, fp32: torch.Tensor) -> Accuracy:
    """Compares a BF16 output bit for bit with ``reference`` and numerically with ``fp32``, all of one shape."""
    mismatches = None
    if reference is not None:
        mismatches = int((out.view(torch.int16) != reference.view(torch.int16)).sum())
    got, expected = out.to(torch.float64).flatten(), fp32.to(torch.float64).flatten()
    return Accuracy(
        name,
        backend,
        tuple(out.shape),
        mismatches,
        float((got - expected).abs().max()),
        float(torch.nn.functional.cosine_similarity(got, expected, dim=0)),
    )


def accuracy_table(columns: Sequence[Accuracy]) -> Table:
    """One column per implementation."""

    def mismatches(accuracy: Accuracy) -> str:
        if accuracy.mismatches is None:
            return ""
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
        ("max abs error to FP32", lambda c: f"{c.max_abs_error:.4g}"),
        ("cosine to FP32", lambda c: f"{c.cosine:.6f}"),
    ):
        table.add_row(heading, *map(value, columns))
    return table


def resource_table(plan: Plan, resources: Resources) -> Table:
    """What the assembler reports for the kernel, and every line of the plan."""
    table = Table(title=f"Kernel for {plan.arch.name}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    spills = (
        "none"
        if not (resources.stack_bytes or resources.local_bytes)
        else (f"stack {resources.stack_bytes} B, local memory {resources.local_bytes} B")
    )
    table.add_row("registers per thread", f"{resources.registers} of {plan.arch.max_registers}")
    table.add_row("spills", spills)
    table.add_row("static SMEM", f"{resources.static_smem_bytes:,} B", end_section=True)
    for name, value in plan.describe():
        table.add_row(name, value)
    return table


# --- pictures --------------------------------------------------------------------------------------------------------


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


def save_figure(
    path: Path,
    photos: Sequence[np.ndarray],
    maps: dict[str, torch.Tensor],
    *,
    title: str,
    footnote: str,
    names: Sequence[str],
) -> None:
    """Writes one PNG: each photo beside its maps.

    Args:
        path: file to write.
        photos: square uint8 or float RGB arrays ``[H, W, 3]``.
        maps: title -> ``[len(photos), grid, grid, 3]`` colours in [0, 1].
        title: above the figure.
        footnote: below the figure.
        names: one per photo.
    """
    from matplotlib.figure import Figure

    per_photo, per_row = 1 + len(maps), 2 if len(photos) > 3 else 1
    lines = -(-len(photos) // per_row)
    # Inches: cells of 1.7, a gap between the groups of one row, and room for the texts.
    figure = Figure(figsize=(1.7 * per_photo * per_row + 0.5, 1.85 * lines + 0.9), dpi=150, facecolor="white")
    widths = ([1.0] * per_photo + [0.12]) * per_row
    grid = figure.add_gridspec(
        lines, len(widths) - 1, width_ratios=widths[:-1], wspace=0.06, hspace=0.12,
        left=0.03, right=0.985, bottom=0.35 / (1.85 * lines + 0.9), top=1 - 0.62 / (1.85 * lines + 0.9),
    )  # fmt: skip
    for index, photo in enumerate(photos):
        line, group = divmod(index, per_row)
        pictures = {"photo": photo} | {name: colours[index].numpy() for name, colours in maps.items()}
        for column, (name, picture) in enumerate(pictures.items()):
            axes = figure.add_subplot(grid[line, group * (per_photo + 1) + column])
            axes.imshow(picture, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(False)
            if line == 0:
                axes.set_title(name, fontsize=9)
            if column == 0:
                axes.set_ylabel(names[index], fontsize=8)
    figure.suptitle(title, fontsize=11, y=0.985)
    figure.text(0.5, 0.012, footnote, ha="center", fontsize=8, color="0.35")
    figure.savefig(path, format="png")
