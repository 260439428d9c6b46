"""`tests.gpu.silicon_sums` with the emulator in the place of the GPU: its kernels, and what it counts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cute_kernels.emulator import Options
from tests.emulator.ptx_launch import launch
from tests.emulator.sum_inputs import STYLES
from tests.gpu.silicon_sums import KINDS, Counts, measure
from tests.nightly import by_day


class Emulated:
    """Stands for a GPU."""

    def __init__(self, arithmetic: str) -> None:
        self.options = Options(arithmetic=arithmetic)

    def launch(self, text: str, arrays: Sequence[np.ndarray], blocks: int, threads: int, shared: int) -> None:
        other = "sums of another kind" if self.options.arithmetic == "exact" else None
        launch(
            text, *arrays, grid=(blocks, 1, 1), block=(threads, 1, 1), dynamic_smem=shared, options=self.options,
            hardware=other,
        )  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """As the program has it: it must not wait for itself."""
    with multiprocessing.get_context("fork").Pool(2) as processes:
        yield processes
        processes.close()
        processes.join()  # to end processes while one writes its result waits for ever, now and then


NAMES = {kind.name: kind for kind in KINDS}
DAILY = {
    "wgmma f32 e4m3 e4m3", "wgmma f16 e5m2 e5m2", "wgmma f16 f16 f16", "wgmma s32 s8 u8 satfinite",
    "mma.sync k16 f16 f16 f16", "mma.sync k32 f32 e4m3 e4m3", "mma.sync k4 f32 tf32 tf32",
}  # fmt: skip


@pytest.mark.parametrize("name", by_day(NAMES, DAILY))
def test_kernels_compute_what_they_are_compared_with(name: str, pool: Any) -> None:
    counts = Counts(NAMES[name])
    measure(Emulated("silicon"), counts, pool, 1, 5)
    assert counts.results == len(STYLES) * counts.kind.m * counts.kind.n
    assert counts.differ == 0, counts.first


@pytest.mark.parametrize("name", ["wgmma f32 e4m3 e4m3", "mma.sync k32 f32 e4m3 e4m3"])
def test_other_sums_are_counted(name: str, pool: Any) -> None:
    counts = Counts(NAMES[name])
    measure(Emulated("exact"), counts, pool, 1, 5)
    assert counts.differ > 50
    assert "GPU 0x" in counts.first and "emulator 0x" in counts.first
    assert counts.described()["differ"] == sum(counts.described()["by style"].values())


class Broken:
    """A GPU whose driver does not know the PTX."""

    def launch(self, *arguments: object) -> None:
        raise RuntimeError("cuModuleLoadDataEx returned 218")


def test_what_the_gpu_does_not_execute_is_said(pool: Any) -> None:
    counts = Counts(KINDS[0])
    measure(Broken(), counts, pool, 1, 5)
    assert (counts.results, counts.differ) == (0, -1)
    assert "returned 218" in counts.line() and "returned 218" in counts.described()["first"]
