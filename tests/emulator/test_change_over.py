"""Kernels that change over to machine code while units are at work, with detectors."""

from __future__ import annotations

import pytest

from cute_kernels.config import Sm90GemmConfig, Sm90PatchEmbedConfig, Sm100GemmConfig, Sm100PatchEmbedConfig
from cute_kernels.emulator import Options
from cute_kernels.runtime.emulated import launch as emulate
from tests.emulator.gemm_inputs import GemmCase, make_gemm_case
from tests.emulator.kernel_inputs import Case, make_case
from tests.emulator.test_native import change_after


def make(name: str) -> Case | GemmCase:
    if name == "sm100":
        return make_case(batch=4, positions=128, n=256, k=384, sm_count=2, config=Sm100PatchEmbedConfig(), seed=1)
    if name == "sm90":
        return make_case(batch=3, positions=128, n=128, k=256, sm_count=2, config=Sm90PatchEmbedConfig(), seed=1)
    config = Sm100GemmConfig(tile_n=64, stages=3, store_stages=1) if name == "gemm sm100" else Sm90GemmConfig()
    arch = "sm_100a" if name == "gemm sm100" else "sm_90a"
    return make_gemm_case(m=512, n=128, k=256, config=config, arch=arch, sm_count=2, seed=1)


@pytest.mark.parametrize("name", ["sm100", "sm90", "gemm sm100", "gemm sm90"])
def test_results_do_not_depend_on_when_that_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(name)
    expected = emulate(case.plan, case.tensors, Options(native=False)).by_opcode
    for after in (200, 1200):
        case.tensors.out.zero_()
        with monkeypatch.context() as patch:
            changes = change_after(patch, after)
            report = emulate(case.plan, case.tensors, Options())
        assert changes, after
        assert not case.mismatches().any(), after
        assert report.by_opcode == expected, after
