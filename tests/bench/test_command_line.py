"""Arguments of the benchmark, and how a peer's failure becomes a row."""

from __future__ import annotations

import pytest
import torch

from bench import patch_embed as program
from bench.cases import Case, CaseData
from bench.configs import parse_config
from bench.peers import OURS, PEERS, Candidate, Peer, PeerUnavailable
from cute_kernels import Sm90PatchEmbedConfig, Sm100PatchEmbedConfig, Sm100ResidentConfig

DATA = CaseData(Case("base-p16", 2, 3, 32, 16, 2), torch.device("cpu"))


def test_defaults_measure_the_headline_with_all_peers() -> None:
    arguments = program.parse_arguments([])
    assert [case.rows for case in arguments.cases] == [928256]
    assert arguments.peers == list(PEERS)
    assert (arguments.protocol.rounds, arguments.protocol.sustained_s) == (7, 0.6)


def test_quick_is_shorter_but_explicit_values_win() -> None:
    assert program.parse_arguments(["--quick"]).protocol.rounds == 3
    protocol = program.parse_arguments(["--quick", "--rounds", "5", "--sustained", "0.3"]).protocol
    assert (protocol.rounds, protocol.sustained_s) == (5, 0.3)


def test_models_suite() -> None:
    arguments = program.parse_arguments(["--suite", "models"])
    assert len(arguments.cases) == 5 * (4 + 3 + 3 + 2 + 2)
    chosen = "--suite models --models so400m-p14 --positions 729 --batches 2 --peers Triton*flat".split()
    chosen[-1] = "Triton flat"
    arguments = program.parse_arguments(chosen)
    assert [(c.k, c.n, c.rows) for c in arguments.cases] == [(592, 1152, 1458)]
    assert [peer.name for peer in arguments.peers] == [OURS, "Triton flat"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--peers", "nobody"],
        ["--rounds", "0"],
        ["--batches", "8"],
        ["--suite", "models", "--models", "vit"],
        ["--configs", "tile_rows=many"],
        ["--configs", "rows=128"],
    ],
)
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.parse_arguments(argv)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_configs_are_typed() -> None:
    config = parse_config("tile_rows=192, pingpong=false,weight=streamed", Sm90PatchEmbedConfig)
    assert config == Sm90PatchEmbedConfig(tile_rows=192, pingpong=False, weight="streamed")
    with pytest.raises(ValueError, match="true or false"):
        parse_config("pingpong=2", Sm90PatchEmbedConfig)


def test_fields_decide_between_kernels_of_one_architecture() -> None:
    texts = {"stages=3": Sm100PatchEmbedConfig(stages=3), "weight=smem,stages=3": Sm100ResidentConfig("smem", stages=3)}
    assert program.chosen_configs(list(texts), "sm_100a") == texts
    with pytest.raises(ValueError, match="Sm100PatchEmbedConfig: setting tile_m=1.*Sm100ResidentConfig: setting"):
        program.chosen_configs(["tile_m=1"], "sm_100a")


def test_recorded_command_repeats_the_run_anywhere() -> None:
    argv = ["--rounds", "3", "--output", "/somewhere", "--peers", "Triton flat", "quack", "--name=mine"]
    assert program.recorded_command(argv) == "python -m bench.patch_embed --rounds 3 --peers 'Triton flat' quack"
    assert program.recorded_command([]) == "python -m bench.patch_embed"


def test_ours_is_built_before_quack_changes_cute() -> None:
    assert PEERS[0].name == OURS
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def _right() -> torch.Tensor:
    x, weight = DATA.x[0].double(), DATA.weight.double()
    table = (DATA.bias.double() + DATA.pos.double()).repeat(2, 1)
    return (x @ weight.T * 0.0625 + table).to(torch.bfloat16)


PEER = Peer("peer", "complete", "none", "none")


def test_a_right_peer_is_a_candidate() -> None:
    result, candidate = program.build_and_check(PEER, lambda data: Candidate(lambda slot: _right(), "how"), DATA)
    assert candidate is not None
    assert result.check is not None and result.check.passed
    assert (result.detail, result.reason) == ("how", "")


def test_a_wrong_peer_is_not_timed() -> None:
    for out in (_right() + 1, torch.full_like(_right(), float("nan"))):
        result, candidate = program.build_and_check(PEER, lambda data, out=out: Candidate(lambda slot: out), DATA)
        assert candidate is None
        assert result.reason.startswith("WRONG")


def test_a_peer_that_writes_nothing_is_not_timed() -> None:
    DATA.out[0].copy_(_right())
    result, candidate = program.build_and_check(PEER, lambda data: Candidate(lambda slot: data.out[0]), DATA)
    assert candidate is None
    assert "96 elements unwritten" in result.reason


def test_reasons_of_peers_that_cannot_run() -> None:
    def unavailable(data: CaseData) -> Candidate:
        raise PeerUnavailable("needs another card")

    def broken(data: CaseData) -> Candidate:
        raise KeyError("tile")

    assert program.build_and_check(PEER, unavailable, DATA)[0].reason == "needs another card"
    assert program.build_and_check(PEER, broken, DATA)[0].reason == "KeyError: 'tile'"
    missing = Peer("peer", "complete", "no_such_module", "build")
    assert "not installed" in program.build_and_check(missing, missing.build, DATA)[0].reason


def test_without_a_gpu_the_program_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
