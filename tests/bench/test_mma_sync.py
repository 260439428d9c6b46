"""bench/mma_sync.py and the benches on GPUs without WGMMA and tcgen05: emulated devices, no times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import cases, configs, gemm, gemm_cases, image_cases, images, mma_sync, patch_embed, registers
from bench.cases import Case, CaseData
from bench.gemm_cases import GemmCase
from bench.image_cases import ImagesCase
from bench.peers import OURS, PEERS, PeerUnavailable, torch_peers
from bench.results import from_json
from cute_kernels.config import Sm80GemmConfig, Sm80ImagesConfig
from cute_kernels.plan.registry import MMA_SYNC
from tests.bench.test_capability_10 import NoSampler, launched_once, peers_of
from tests.gpu import emulated

pytestmark = pytest.mark.usefixtures("few_input_sets")

TINY = {"tf32": (GemmCase("tiny", 40, 48, 64, "tf32"),), "uint8": (ImagesCase("tiny", 2, 32, 16, 2),)}


@pytest.fixture
def without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in (patch_embed, gemm, images):
        monkeypatch.setattr(program, "measure", launched_once)
        monkeypatch.setattr(program, "elapsed_ms", lambda *_, **__: 1.0)
    for program in (patch_embed, mma_sync):
        monkeypatch.setattr(program, "DeviceSampler", NoSampler)
    for module in (cases, gemm_cases, image_cases):
        monkeypatch.setattr(module, "ROTATED_BYTES", 1)


@pytest.fixture(params=["sm_80", "sm_90a"])
def arch(request: pytest.FixtureRequest, without_times: None) -> Iterator[str]:
    with emulated.device(request.param):
        yield request.param


def test_ours_are_kernels_of_mma_sync(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Every rounding of TF32, and images; on an H100 beside WGMMA's kernels. All are checked."""
    monkeypatch.setattr(mma_sync, "PARTS", TINY)
    monkeypatch.setattr(mma_sync, "bare_rates", lambda parts, arch: dict.fromkeys(parts, 1e12))
    argv = ["--parts", *TINY, "--output", str(tmp_path), "--name", "found"]
    assert mma_sync.main(argv) == 0
    product, embedded = from_json((tmp_path / "found.json").read_text()).cases
    ours = {peer.name: peer for peer in product.peers if peer.name.startswith(OURS)}
    assert list(ours) == [OURS, *(f"{OURS} mma.sync {name}" for name in mma_sync.ROUNDINGS)]
    assert all(peer.check.passed and peer.runs for peer in ours.values())
    errors = [ours[f"{OURS} mma.sync {name}"].check.error for name in mma_sync.ROUNDINGS]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1.5 * errors[2]
    (images_of,) = (peer for peer in embedded.peers if peer.name == f"{OURS} mma.sync")
    assert images_of.check.passed
    assert json.loads((tmp_path / "found-rates.json").read_text()) == dict.fromkeys(TINY, 1e12)
    assert "bare mma.sync, T(FL)OP/s: tf32 1, uint8 1" in capsys.readouterr().out


@pytest.mark.parametrize("arch", MMA_SYNC)
def test_configurations_are_what_the_plans_choose(arch: str) -> None:
    for cases_ in mma_sync.PARTS.values():
        for case in cases_:
            found = mma_sync.configs_of(case, arch, 100)
            kind = Sm80ImagesConfig if isinstance(case, ImagesCase) else Sm80GemmConfig
            assert all(type(config) is kind for config in found.values())
            assert len(found) == (3 if case.dtype == "tf32" else 1)


def test_devices_without_them_are_refused() -> None:
    assert mma_sync.mma_arch("sm_90a") == "sm_90" and mma_sync.mma_arch("sm_86") == "sm_86"
    with pytest.raises(ValueError, match=r"compute capability 10.0: must be one of 8.0, 8.6, 8.9, 9.0, 12.0"):
        mma_sync.mma_arch("sm_100a")


def test_benches_run_on_every_device_that_has_kernels() -> None:
    assert configs.BENCHED == ("sm_100a", "sm_90a", "sm_80", "sm_86", "sm_89", "sm_120")
    assert configs.arch_of((8, 7)) == "sm_86" and configs.arch_of((12, 1)) == "sm_120"
    assert [configs.rows_type(name) for name in ("sm_90a", "sm_86", "sm_89")] == [
        "float8_e4m3fn", "bfloat16", "float8_e4m3fn"
    ]  # fmt: skip


def test_rows_of_bf16_where_nothing_multiplies_e4m3(
    without_times: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headline bench as it is called anywhere, ours checked, and peers of FP8 left out with the reason."""
    monkeypatch.setitem(cases.MODELS, "tiny", (80, 72, (7,)))
    argv = "--suite models --models tiny --batches 5 --name found --configs tile_m=64,tile_n=64 --peers".split()
    with emulated.device("sm_86"):
        assert patch_embed.main([*argv, OURS, "scaled_mm + add", "cuBLASLt", "--output", str(tmp_path)]) == 0
    peers = peers_of(tmp_path / "found.json")
    assert peers[OURS].check.passed and peers[f"{OURS} tile_m=64,tile_n=64"].check.passed
    assert peers["scaled_mm + add"].check.passed
    assert peers["cuBLASLt"].reason == "set up here for float8_e4m3fn only, not for bfloat16"


def test_data_of_bf16_rows() -> None:
    case = Case("tiny", 2, 5, 32, 16, 2, "bfloat16")
    data = CaseData(case, torch.device("cpu"))
    assert data.x[0].dtype is data.weight.dtype is torch.bfloat16 and data.scale == 1.0
    assert case.bytes == 2 * (10 * 32 + 16 * 32 + 10 * 16) + 4 * 5 * 16
    assert data.check(torch_peers.build_eager(data).launch(0), with_table=True).passed
    with pytest.raises(PeerUnavailable, match="not for bfloat16"):
        next(peer for peer in PEERS if peer.name == "Triton flat").build(data)


def test_registers_of_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row per problem, a column per target; every target has all problems, FP8 where it multiplies it."""
    assert set(registers.problems("sm_89")) - set(registers.problems("sm_80")) == {"rows float8_e4m3fn"}
    problem = registers.problems("sm_80")["gemm bfloat16 512"]
    monkeypatch.setattr(registers, "problems", lambda arch: {"gemm": problem} if arch == "sm_80" else {})
    header, _, row = registers.table_of(["sm_80", "sm_86"]).splitlines()
    assert header == "| problem | sm_80 | sm_86 |"
    assert re.fullmatch(r"\| gemm \| 64 x 64 x 128, 4: \d+(, \d+ B spilled)? \|  \|", row)
