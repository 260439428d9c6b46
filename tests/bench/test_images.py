"""bench/images.py without a GPU: the command line, the documents, and every eager peer against FP64 at a tiny size."""

from __future__ import annotations

import re

import pytest
import torch

from bench import image_cases, images, results
from bench.image_cases import ImagesCase, ImagesData
from bench.peers import OURS, PeerUnavailable, image_peers
from bench.results import CaseResult, PeerResult, Results
from bench.timing import Protocol
from cute_kernels import Sm90GatherConfig
from cute_kernels.plan import make_plan
from tests.gpu import emulated

pytestmark = pytest.mark.usefixtures("few_input_sets")

CASE = ImagesCase("tiny", 2, 32, 16, 2)
NORMALISED = ImagesCase("tiny", 2, 32, 16, 2, "bfloat16")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = images.parse_arguments([
        "--batches", "1", "64", "--peers", "conv", "--configs", "order=image,pingpong=0", "--rounds", "3",
    ])  # fmt: skip
    assert [case.name for case in arguments.cases] == ["base-p16 x 1", "base-p16 x 64"]
    assert [peer.name for peer in arguments.peers] == [OURS, "conv"]
    (config,) = arguments.configs.values()
    assert (config.order, config.pingpong, config.stages) == ("image", False, None)
    assert arguments.protocol.rounds == 3
    for wrong in (["--models", "x"], ["--batches", "0"], ["--configs", "stages"], ["--configs", "order=1,x=2"]):
        with pytest.raises(SystemExit):
            images.parse_arguments(wrong)
        assert re.search("must be one of|must be at least 1|fields for", capsys.readouterr().err)


def test_normalised_pixels() -> None:
    """Twice the bytes, tunables of another kernel, and the variants that a sweep adds, legal and all different."""
    arguments = images.parse_arguments(["--pixels", "bfloat16", "--batches", "64", "--configs", "tile_n=192,cluster=2"])
    (case,) = arguments.cases
    (config,) = arguments.configs.values()
    assert isinstance(config, Sm90GatherConfig) and config.tile_n == 192
    assert case.pixels == 2 * 64 * 3 * 224 * 224 and "bfloat16" in case.name and "bfloat16" in case.title
    swept = images.swept_configs(case, 8)
    assert len(swept) == len(set(swept.values())) == 8
    for config in swept.values():
        make_plan(image_cases.problem(case), config)


def test_sizes() -> None:
    case = next(iter(image_cases.make_cases(["base-p16"], [4736])))
    assert (case.positions, case.rows, case.k) == (196, 928_256, 768)
    assert case.pixels == 4736 * 3 * 224 * 224 and case.flops == 2 * 928_256 * 768 * 768
    assert case.slots == 1 and "4736" in case.title


def test_a_document_is_read_back() -> None:
    result = CaseResult(CASE, [PeerResult(OURS, "complete", reason="not timed")])
    document = Results("now", "bench.images", {}, Protocol(), [result])
    assert results.from_json(results.to_json(document)) == document


@pytest.mark.parametrize("build", ["build_ours", "build_rows", "build_integer_rows", "build_conv", "build_timm"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("patch", [14, 32])
def test_other_patches_and_layouts(build: str, patch: int, channels_last: bool) -> None:
    case = ImagesCase("tiny", 2, 2 * patch, 16, 2, patch=patch, channels_last=channels_last)
    data = ImagesData(case, torch.device("cpu"))
    assert data.images[0].is_contiguous(memory_format=torch.channels_last) == channels_last
    check = data.check(getattr(image_peers, build)(data).launch(0).contiguous(), with_table=True)
    assert check.passed and 0 < check.row_error < (0.08 if build == "build_rows" else 0.02)


def test_the_pass_in_front() -> None:
    with emulated.device("sm_90a"):
        case = ImagesCase("tiny", 1, 28, 16, 1, patch=14)
        data = ImagesData(case, torch.device("cuda"))
        rows = image_peers.build_pass(data).launch(0)
        assert torch.equal(rows[:, :588].cpu(), data.rows(data.images[0]).view(-1, 588).cpu())
        with pytest.raises(PeerUnavailable, match="one kernel reads the images"):
            image_peers.build_pass(ImagesData(ImagesCase("strips", 160, 64, 16, 160), torch.device("cuda")))


def test_either_way_is_a_peer_whatever_the_plan_chooses() -> None:
    """Each compares its bits with the reference; p = 14 has to take two kernels."""
    with emulated.device("sm_90a"):
        data = ImagesData(CASE, torch.device("cuda"))
        one, two = image_peers.build_one_kernel(data), image_peers.build_two_kernels(data)
        assert "source strips" in one.detail and "patchify in front" in two.detail
        assert torch.equal(one.launch(0).cpu(), two.launch(0).cpu())
        with pytest.raises(PeerUnavailable, match="14"):
            image_peers.build_one_kernel(ImagesData(ImagesCase("p14", 1, 28, 16, 1, patch=14), torch.device("cuda")))


def test_variants_of_the_command_line() -> None:
    (case,) = images.parse_arguments(["--models", "base-p14", "--batches", "8", "--channels-last"]).cases
    assert (case.patch, case.positions, case.k, case.channels_last) == (14, 256, 588, True)
    assert "channels last" in case.name and "patches of 14" in case.title
    assert len(make_plan(image_cases.problem(case), arch="sm_90a").launches) == 2
    (case,) = images.parse_arguments(["--models", "vit-b32", "--batches", "8", "--channels-last"]).cases
    assert len(make_plan(image_cases.problem(case), arch="sm_90a").launches) == 1


def test_precisions() -> None:
    """Of uint8 images int8, beside which BF16 is timed."""
    cpu = torch.device("cpu")
    data, errors = ImagesData(CASE, cpu), {}
    for build in ("ours", "bf16"):
        check = data.check(getattr(image_peers, f"build_{build}")(data).launch(0).contiguous(), with_table=True)
        assert check.passed
        errors[build] = check.row_error
    assert errors["bf16"] < errors["ours"]


@pytest.mark.parametrize("build", ["build_ours", "build_rows", "build_conv", "build_conv_channels_last", "build_timm"])
@pytest.mark.parametrize("case", [CASE, NORMALISED], ids=["uint8", "bfloat16"])
def test_peers_compute_the_same(build: str, case: ImagesCase) -> None:
    """With positions in the wrong order the check fails: it can."""
    data = ImagesData(case, torch.device("cpu"))
    out = getattr(image_peers, build)(data).launch(0)
    check = data.check(out.contiguous(), with_table=True)
    assert check.passed and 0 < check.row_error < (0.08 if build == "build_rows" else 0.02)
    assert not data.check(out.flip(1).contiguous(), with_table=True).passed


def test_the_product_alone() -> None:
    data = ImagesData(NORMALISED, torch.device("cpu"))
    out = image_peers.build_gemm(data).launch(0)
    assert data.check(out, with_table=False).passed and not data.check(out, with_table=True).passed
