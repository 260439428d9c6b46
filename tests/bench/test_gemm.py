"""Arguments, data and figures of the dense GEMM's benchmark, on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from bench import gemm as program
from bench import results as r
from bench.gemm_cases import GemmCase, GemmData
from bench.peers import OURS, Candidate, PeerUnavailable
from bench.peers.gemm_peers import build_ours, build_quack
from bench.timing import Protocol, Run
from cute_kernels import Sm90GemmConfig, Sm100GemmConfig

pytestmark = pytest.mark.usefixtures("few_input_sets")

CASE = GemmCase("small", 40, 24, 16)


def test_suites() -> None:
    assert [case.m for case in program.parse_arguments([]).cases] == [1024, 2048, 4096, 6144, 8192, 10240, 12288]
    layers = program.parse_arguments(["--suite", "siglip2", "--batches", "2"]).cases
    base, so400m = [(c.m, c.n, c.k) for c in layers[:3]], [(c.m, c.n, c.k) for c in layers[3:]]
    assert base == [(392, 768, 768), (392, 3072, 768), (392, 768, 3072)]
    assert so400m == [(512, 1152, 1152), (512, 4304, 1152), (512, 1152, 4304)]
    assert len(program.parse_arguments(["--suite", "all"]).cases) == 7 + 12


def test_peers_are_chosen_by_name_and_ours_is_always_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert [peer.name for peer in program.parse_arguments(["--peers", "quack"]).peers] == [OURS, "quack"]
    for argv in (["--peers", "nobody"], ["--rounds", "0"], ["--limit", "0"], ["--settle", "-1"]):
        with pytest.raises(SystemExit):
            program.parse_arguments(argv)
        assert "error:" in capsys.readouterr().err


def test_configs() -> None:
    configs = program.chosen_configs(["candidates", "tile_n=192,pingpong=1"], "sm_90a")
    assert list(configs.values()) == [*program.CANDIDATES["sm_90a"], Sm90GemmConfig(tile_n=192, pingpong=True)]
    assert program.chosen_configs(["stages=3"], "sm_100a") == {"stages=3": Sm100GemmConfig(stages=3)}
    for text in ("tile_k=3", "stages", "stages=many"):
        with pytest.raises(ValueError, match="tile_k|stages|many"):
            program.chosen_configs([text], "sm_90a")


def test_check_notices_one_wrong_row_one_unwritten_element_and_a_wrong_shape() -> None:
    data = GemmData(CASE, torch.device("cpu"))
    good = data.a[0] @ data.b.T
    assert data.check(good).passed
    swapped = good.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert not data.check(swapped).passed and data.check(swapped).row_error > 0.5
    holed = good.clone()
    holed[39, 23] = float("nan")
    assert data.check(holed).unwritten == 1 and not data.check(holed).passed
    with pytest.raises(ValueError, match="expected torch.bfloat16"):
        data.check(good.float())
    with pytest.raises(ValueError, match="expected torch.bfloat16"):
        data.check(good.T)


def test_tf32_cases() -> None:
    """FP32 tensors, four bytes each; a result of TF32 products passes, one of BF16 products does not."""
    arguments = program.parse_arguments(["--suite", "all", "--dtype", "tf32"])
    assert {case.dtype for case in arguments.cases} == {"tf32"} and len(arguments.cases) == 7 + 12
    case = GemmCase("small", 40, 24, 64, "tf32")
    assert case.bytes == 2 * GemmCase("small", 40, 24, 64).bytes and "TF32" in case.title
    data = GemmData(case, torch.device("cpu"))
    assert data.a[0].dtype == data.b.dtype == data.out[0].dtype == torch.float32
    assert data.check(build_ours(data).launch(0)).passed
    coarse = data.check((data.a[0].bfloat16().double() @ data.b.bfloat16().double().T).float())
    assert data.check(build_ours(data).launch(0)).error < coarse.error / 4
    with pytest.raises(PeerUnavailable, match="16-bit"):
        build_quack(data)


def test_ratios_and_round_trip_of_results() -> None:
    def peer(name: str, ms: float) -> r.PeerResult:
        return r.PeerResult(name, "complete", runs=[Run("burst", 0, 5, ms), Run("sustained", 0, 10, 2 * ms)])

    cases = [r.CaseResult(CASE, [peer(OURS, 1.0), peer("slow", 2.0)])]
    cases.append(r.CaseResult(CASE, [peer(OURS, 1.0), peer("slow", 8.0), peer("once", 0.5)]))
    results = r.Results("2026-01-01", "command", {}, Protocol(), cases)
    found = program.ratios(results, "burst")
    assert found["slow"] == [2.0, 8.0] and found["once"] == [0.5] and OURS not in found
    assert r.from_json(r.to_json(results)) == results
    assert CASE.title in r.report(results, OURS)
    cases[0].peers += [peer(program.TORCH, 1.5), peer(program.CUBLASLT, 1.25)]
    cases[1].peers += [peer(program.TORCH, 0.75)]
    assert program.ratios(results, "sustained")[program.CUBLAS] == [1.25], "needs both"
    assert math.isclose(CASE.flops, 2 * 40 * 24 * 16) and CASE.bytes == 2 * (640 + 384 + 960)


def test_peers_are_not_built_after_the_deadline_but_ours_is(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build_and_check(peer, build, data):
        built.append(peer.name)
        return r.PeerResult(peer.name, peer.scope), Candidate(lambda slot: None)

    monkeypatch.setattr(program.patch_embed, "build_and_check", build_and_check)
    monkeypatch.setattr(program, "measure", lambda launches, *_, **__: {n: [Run("burst", 0, 1, 1.0)] for n in launches})
    monkeypatch.setattr(program, "elapsed_ms", lambda *_: 10.0)
    arguments = program.parse_arguments(["--peers", "quack"])
    result = program.run_case(CASE, {}, arguments, torch.device("cpu"), None, deadline=0.0)
    assert built == [OURS] and [bool(p.runs) for p in result.peers] == [True, False]
    assert result.peers[1].reason == "the time of this case was up"
    program.run_case(CASE, {}, arguments, torch.device("cpu"), None)
    assert built == [OURS, OURS, "quack"]
