"""The benchmarks on a device of compute capability 10.0 that is not there: arguments, cases, peers, our kernel's calls.

Our kernel runs in the emulator and torch's peers on the CPU. Not shown: times, CUDA graphs, `torch.compile`, and peers
whose packages are not installed, of which only the reasons are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import cases, gemm, gemm_cases, image_cases, images, patch_embed, tune, tune_gemm
from bench.archive import recorded
from bench.configs import CONFIG_TYPES, arch_of, parse_config
from bench.peers import OURS, PeerUnavailable, quack_configs
from bench.results import from_json
from bench.timing import Run
from cute_kernels.config import GemmProblem, PatchEmbedProblem, Sm100GemmConfig, Sm100PatchEmbedConfig
from cute_kernels.plan import make_plan
from tests.gpu import emulated

pytestmark = pytest.mark.usefixtures("few_input_sets")

ARCH = "sm_100a"


class NoSampler:
    """Stands for NVML."""

    driver, power_limit_watts = "none", 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device


def launched_once(launches, protocol, *_, **__) -> dict[str, list[Run]]:
    """Stands for `measure`: what is timed is launched, and no time is taken."""
    for launch in launches.values():
        launch(0)
    return {name: [Run(mode, 0, 1, 1.0) for mode in ("burst", "sustained")] for name in launches}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An emulated B200, inputs of one set, and no times."""
    for program in (patch_embed, gemm, images):
        monkeypatch.setattr(program, "DeviceSampler", NoSampler)
        monkeypatch.setattr(program, "measure", launched_once)
        monkeypatch.setattr(program, "elapsed_ms", lambda *_, **__: 1.0)
    for module in (cases, gemm_cases, image_cases):
        monkeypatch.setattr(module, "ROTATED_BYTES", 1)
    with emulated.device(ARCH):
        yield


def peers_of(path: Path) -> dict[str, SimpleNamespace]:
    (result,) = from_json(path.read_text()).cases
    return {peer.name: peer for peer in result.peers}


def test_the_patch_embed(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.MODELS, "tiny", (80, 72, (7,)))
    argv = "--suite models --models tiny --batches 5 --configs tile_n=512".split()
    names = [OURS, "scaled_mm + add", "Triton flat", "quack position-major", "quack", "copy of the same bytes"]
    argv += ["--peers", *names, "--output", str(tmp_path), "--name", "b200"]
    assert patch_embed.main(argv) == 0
    peers = peers_of(tmp_path / "b200.json")
    assert peers[OURS].check.passed and peers["scaled_mm + add"].scope == "complete"
    assert "tile_n = 512" in peers[f"{OURS} tile_n=512"].reason
    assert peers["copy of the same bytes"].runs
    for name, package in (("Triton flat", "triton"), ("quack", "quack")):
        absent = importlib.util.find_spec(package) is None
        assert peers[name].reason and peers[name].reason.startswith("not installed") == absent


def test_the_gemm(device: None, tmp_path: Path) -> None:
    argv = "--sizes 136 --configs tile_n=96 --peers quack --name b200 --output".split()
    assert gemm.main([*argv, str(tmp_path)]) == 0
    peers = peers_of(tmp_path / "b200.json")
    assert peers[OURS].check.passed and peers[OURS].detail.startswith("Sm100GemmConfig")
    assert "tile_n = 96" in peers[f"{OURS} tile_n=96"].reason
    assert "set up here" not in peers["quack"].reason


def test_images(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(image_cases.MODELS, "tiny", (72, 32, 16))
    argv = "--models tiny --batches 3 --peers conv --configs cta_group=1,weight=smem tile_patches=17".split()
    assert images.main([*argv, "--output", str(tmp_path), "--name", "b200"]) == 0
    peers = peers_of(tmp_path / "b200.json")
    smem = peers[f"{OURS} cta_group=1,weight=smem"]
    assert peers[OURS].check.passed and smem.check.passed and smem.runs and peers["conv"].check.passed
    assert "tile_patches = 17" in peers[f"{OURS} tile_patches=17"].reason
    with pytest.raises(SystemExit):
        images.main(["--pixels", "bfloat16"])
    assert "allowed on sm_100a: uint8" in capsys.readouterr().err


def test_a_configuration_of_the_other_architecture_is_refused(device: None, capsys) -> None:
    assert patch_embed.main(["--configs", "warpgroups=2"]) == 2
    assert "fields for Sm100PatchEmbedConfig: tile_n, stages" in capsys.readouterr().err
    assert gemm.main(["--configs", "tile_m=64"]) == 2
    assert "fields for Sm100GemmConfig: block_m" in capsys.readouterr().err


def test_configurations_by_text() -> None:
    config = parse_config("tile_n=128,epilogue=bf16x2", CONFIG_TYPES["patch_embed"][ARCH])
    assert config == Sm100PatchEmbedConfig(tile_n=128, epilogue="bf16x2")
    assert parse_config("cluster_m=4", CONFIG_TYPES["gemm"][ARCH]) == Sm100GemmConfig(cluster_m=4)
    assert list(gemm.chosen_configs(["candidates"], ARCH).values()) == list(gemm.CANDIDATES[ARCH])
    assert arch_of((10, 0)) == ARCH and arch_of((9, 0)) == "sm_90a"
    with pytest.raises(ValueError, match="compute capability 10.3: must be one of 10.0, 9.0, 8.0"):
        arch_of((10, 3))


def test_quack_has_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, arch in (((10, 0), ARCH), ((9, 0), "sm_90a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        for configs in (quack_configs.PATCH_EMBED, quack_configs.GEMM):
            assert quack_configs.for_device(configs, torch.device("cuda")) == (arch, configs[arch])
            assert len({config.name for config in configs[arch]}) == len(configs[arch]) >= 5
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(PeerUnavailable, match="only: the device is sm_80"):
        quack_configs.for_device(quack_configs.GEMM, torch.device("cuda"))


def test_every_case_has_a_plan() -> None:
    """Of both benchmarks, default and candidates; the tuners' candidates are legal and distinct."""
    for case in cases.make_cases(list(cases.MODELS), None, cases.BATCHES):
        make_plan(PatchEmbedProblem(case.rows, case.n, case.k, case.positions), None, ARCH)
    for case in (*gemm_cases.squares(), *gemm_cases.siglip2()):
        for config in (None, *gemm.CANDIDATES[ARCH]):
            make_plan(GemmProblem(case.m, case.n, case.k), config, ARCH)
    for case in tune.CASES[:3]:
        plans = tune.candidates(case, ARCH)
        assert len(plans) == len(set(plans)) == (7 + 4) * 6
        assert make_plan(tune.problem(case), Sm100PatchEmbedConfig()).config in {plan.config for plan in plans}
    for case in tune_gemm.CASES[:6]:
        plans = tune_gemm.plans(case, arch=ARCH)
        assert len(plans) == len(set(plans)) >= 4 and plans[0] == make_plan(tune_gemm.problem(case), arch=ARCH)


def test_timings_of_the_tuner_are_read_back(tmp_path: Path, capsys) -> None:
    path, case = tmp_path / "timings.json", tune.CASES[0]
    configs = [plan.config for plan in tune.candidates(case, ARCH)[:3]]
    timings = [(2.0, configs[1]), (3.0, configs[0]), (4.0, configs[2])]
    tune.write(path, ARCH, {case: timings}, {})
    assert tune.read(path) == (ARCH, {case: timings})
    assert tune.main(["report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"mean 1.000, most 1.000 of the fastest in 1 of 1 cases: {configs[1]}" and len(lines) == 3
    with pytest.raises(ValueError, match="one architecture"):
        tune.report([path, recorded("2026-11-21-h200/tune.json")])
