"""What is measured: model sizes and batches, their random inputs, and the reference that checks every peer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

BATCHES = (1, 8, 64, 512, 4736)
SCALE_A, SCALE_B = 0.125, 0.5

MODELS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    # K, N, positions. K of patch size 14 is 588, zero-padded to whole 16-byte rows, as every peer here needs it.
    "base-p16": (768, 768, (196, 256, 576, 1024)),
    "large-p16": (768, 1024, (256, 576, 1024)),
    "so400m-p16": (768, 1152, (256, 576, 1024)),
    "so400m-p14": (592, 1152, (256, 729)),
    "giant-opt-p16": (768, 1536, (256, 576)),
}

ROTATED_BYTES = 160 << 20
"""Input sets of a case together, at least: more than twice the L2 cache of any supported GPU holds for one of them."""

MAX_SLOTS = 512
_CHECK_ROWS = 1 << 15


@dataclass(frozen=True)
class Case:
    """One size: ``images`` x ``positions`` rows of ``k`` values, ``n`` output features in BF16.

    ``dtype`` is that of rows and weight, as torch names it. ``requested_images`` differs from ``images`` if the size
    asked for does not fit the memory of the device.
    """

    model: str
    images: int
    positions: int
    k: int
    n: int
    requested_images: int
    dtype: str = "float8_e4m3fn"

    @property
    def name(self) -> str:
        return f"{self.model}/{self.positions} x {self.images}{'' if self.fp8 else f', {self.dtype}'}"

    @property
    def fp8(self) -> bool:
        """Whether rows are quantised."""
        return self.dtype == "float8_e4m3fn"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a row."""
        return getattr(torch, self.dtype).itemsize

    @property
    def reduced(self) -> bool:
        """Whether the size asked for did not fit."""
        return self.images != self.requested_images

    @property
    def title(self) -> str:
        """One line that says what was measured."""
        reduced = f", reduced from {self.requested_images} images: memory" if self.reduced else ""
        return (
            f"{self.model}: [{self.rows}, {self.k}] x [{self.n}, {self.k}]^T, {self.images} images x {self.positions} "
            f"positions, {self.dtype}, {self.slots} input sets{reduced}"
        )

    @property
    def rows(self) -> int:
        return self.images * self.positions

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: every input read once, every output written once."""
        rows = self.rows * (self.k * self.itemsize + 2 * self.n)
        return rows + self.n * self.k * self.itemsize + 4 * self.positions * self.n

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def slots(self) -> int:
        """Input sets to rotate among."""
        return max(1, min(MAX_SLOTS, -(-ROTATED_BYTES // self.bytes)))

    @property
    def memory(self) -> int:
        """Device bytes while all peers are alive: inputs, outputs, two temporary outputs, copy buffers, check."""
        x, out = self.rows * self.k * self.itemsize, 2 * self.rows * self.n
        return 2 * self.slots * (x + out) + 2 * out + (3 << 30)


def make_cases(models: Sequence[str], positions: Sequence[int] | None, batches: Sequence[int]) -> list[Case]:
    """Cases in the order of the arguments.

    Raises:
        ValueError: unknown model, positions that no chosen model has, or a batch below 1.
    """
    for model in models:
        if model not in MODELS:
            raise ValueError(f"model {model!r}: must be one of {', '.join(MODELS)}")
    if any(batch < 1 for batch in batches):
        raise ValueError(f"batches {list(batches)}: must be at least 1")
    chosen = []
    for model in models:
        k, n, all_positions = MODELS[model]
        for count in all_positions:
            if positions is None or count in positions:
                chosen += [Case(model, batch, count, k, n, batch) for batch in batches]
    if not chosen:
        raise ValueError(f"no model of {list(models)} has positions {list(positions or ())}")
    return chosen


def headline() -> Case:
    """[928256, 768] x [768, 768]^T: 4736 images of 196 positions."""
    return Case("base-p16", 4736, 196, 768, 768, 4736)


def fit(case: Case, free_bytes: int) -> Case:
    """The case, or the most images (in steps of 64, below that of 1) whose tensors fit ``free_bytes``.

    Raises:
        ValueError: not even one image fits.
    """
    if case.memory <= free_bytes:
        return case
    images = case.images
    while images and dataclasses.replace(case, images=images).memory > free_bytes:
        images -= 64 if images > 64 else 1
    if not images:
        raise ValueError(f"{case.name}: one image does not fit {free_bytes} bytes")
    return dataclasses.replace(case, images=images)


@dataclass(frozen=True)
class Check:
    """Largest and overall error ``|out - ref| / |ref|`` (of a row, of everything), and elements left unwritten."""

    row_error: float
    error: float
    unwritten: int

    LIMIT = 0.02

    @property
    def passed(self) -> bool:
        """BF16 rounding gives rows about 0.002; one row at a wrong position gives about 1; NaN never passes."""
        return self.unwritten == 0 and self.row_error < self.LIMIT


class CaseData:
    """Random normal inputs of a case on one device.

    Attributes:
        x: one ``[rows, K]`` tensor of the case's type per slot.
        out: one ``[rows, N]`` BF16 tensor per slot, shared by the peers that write into a given output.
        weight: ``[N, K]`` of the same type. bias: ``[N]`` BF16. pos: ``[S, N]`` BF16.
        table: ``bias + pos`` in FP32, ``[S, N]``.
        scale: the dequantisation multiplier ``SCALE_A * SCALE_B``, exact in FP32; 1 of rows that are not quantised.
    """

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.x = []
        for _ in range(case.slots):
            x = torch.empty(case.rows, case.k, dtype=getattr(torch, case.dtype), device=device)
            for start in range(0, case.rows, _CHECK_ROWS * 4):
                part = x[start : start + _CHECK_ROWS * 4]
                part.copy_(normal(*part.shape))
            self.x.append(x)
        self.weight = normal(case.n, case.k).to(getattr(torch, case.dtype))
        self.bias, self.pos = normal(case.n), normal(case.positions, case.n)
        self.table = self.bias.float() + self.pos.float()
        self.out = [torch.empty(case.rows, case.n, dtype=torch.bfloat16, device=device) for _ in range(case.slots)]
        self.scale = SCALE_A * SCALE_B if case.fp8 else 1.0

    @cached_property
    def table_bf16(self) -> torch.Tensor:
        """``bias + pos`` rounded once to BF16, for the peers that take nothing else."""
        return self.table.to(torch.bfloat16)

    def poison(self) -> None:
        """NaN into the shared output of slot 0 and into the block that the allocator hands out next for an output."""
        self.out[0].fill_(float("nan"))
        torch.full_like(self.out[0], float("nan"))

    def _reference(self, with_table: bool) -> Iterator[tuple[int, torch.Tensor]]:
        weight = self.weight.double().T
        for start in range(0, self.case.rows, _CHECK_ROWS):
            ref = self.x[0][start : start + _CHECK_ROWS].double() @ weight * self.scale
            if with_table:
                rows = torch.arange(start, start + ref.shape[0], device=self.device) % self.case.positions
                ref += self.table[rows]
            yield start, ref

    def check(self, out: torch.Tensor, *, with_table: bool) -> Check:
        """Every element of the output of slot 0 against FP64.

        Args:
            out: ``[rows, N]`` or ``[images, S, N]`` BF16.
            with_table: the peer adds bias and position embedding.

        Raises:
            ValueError: wrong shape or element type.
        """
        if out.dtype != torch.bfloat16 or out.numel() != self.case.rows * self.case.n or out.shape[-1] != self.case.n:
            raise ValueError(f"output {out.dtype} {list(out.shape)}, expected BF16 [{self.case.rows}, {self.case.n}]")
        out = out.reshape(self.case.rows, self.case.n)
        # Device scalars until the end: torch.maximum keeps a NaN, and nothing waits for the host.
        worst, total, norm, unwritten = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(4))
        for start, ref in self._reference(with_table):
            part = out[start : start + ref.shape[0]].double()
            squares, scale = (part - ref).square().sum(1), ref.square().sum(1)
            worst = torch.maximum(worst, (squares / scale).max().sqrt())
            total, norm, unwritten = total + squares.sum(), norm + scale.sum(), unwritten + part.isnan().sum()
        return Check(float(worst), float((total / norm).sqrt()), int(unwritten))
