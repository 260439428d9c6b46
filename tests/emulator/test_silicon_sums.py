"""`tests.gpu.silicon_sums` with the emulator in the place of the GPU: its kernels, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cute_kernels.emulator import Options
from tests.emulator.ptx import launch
from tests.gpu.silicon_sums import KINDS, MmaSync, Wgmma, measure
from tests.nightly import by_day


class Emulated:
    """Stands for a GPU."""

    def __init__(self, arithmetic: str) -> None:
        self.options = Options(arithmetic=arithmetic, native=False)

    def launch(self, text: str, arrays: Sequence[np.ndarray], blocks: int, threads: int, shared: int) -> None:
        launch(text, *arrays, grid=(blocks, 1, 1), block=(threads, 1, 1), dynamic_smem=shared, options=self.options)


class Pool:
    """Of no processes."""

    imap = imap_unordered = staticmethod(map)


NAMES = {kind.name: kind for kind in KINDS}
DAILY = {
    "wgmma f32 e4m3 e4m3", "wgmma f16 e5m2 e5m2", "wgmma f16 f16 f16", "wgmma s32 s8 u8 satfinite",
    "mma.sync k16 f16 f16 f16", "mma.sync k32 f32 e4m3 e4m3", "mma.sync k4 f32 tf32 tf32",
}  # fmt: skip


@pytest.mark.parametrize("name", by_day(NAMES, DAILY))
def test_kernels_compute_what_they_are_compared_with(name: str) -> None:
    kind: Wgmma | MmaSync = NAMES[name]
    found = measure(Emulated("silicon"), kind, 1, 5, Pool, 1)
    assert found["results"] == 7 * kind.m * kind.n
    assert found["differ"] == 0, found["first"]


@pytest.mark.parametrize("name", ["wgmma f32 e4m3 e4m3", "mma.sync k32 f32 e4m3 e4m3"])
def test_other_sums_are_counted(name: str) -> None:
    found = measure(Emulated("exact"), NAMES[name], 1, 5, Pool, 1)
    assert found["differ"] == sum(found["by style"].values()) > 50
    assert "GPU 0x" in found["first"] and "emulator 0x" in found["first"]
